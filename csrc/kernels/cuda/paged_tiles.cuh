// How the attention kernels over plain rows find their work on the device: tiles of query tokens, the keys that a tile reads, and the
// blocks that hold them. The launches that paged_attention_cuda chooses from.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/paged_attention.h"

namespace hetkv {

// What shapes say about a step on tensor cores. One sequence's tokens are `short` if their rows fill at most two tiles of 16.
struct PagedAttentionPlan {
  std::int64_t decode_tiles = 0;  // grid.x of the decode kernel
  std::int64_t partial_rows = 0;  // (token, head) rows of a slot of the workspace; 0 if no row can have two splits
  std::int32_t short_tokens = 0;  // of a sequence, at most
  std::int32_t tile_tokens = 0;   // of a decode tile
  std::int32_t head_tiles = 0;    // of a group
  std::int32_t splits = 0;        // slots of the workspace and grid.z; 0: a block takes all splits of its tile in turn
  bool mixed = false;             // short sequences by the decode kernel, all else by the prefill kernel; otherwise all by decode
};

// Each launches what its name says, for the tokens that the plan gives it. workspace: a slot per split, or one, of
// partial_rows * (dim + 2) floats.
void launch_attention_decode(const PagedAttentionParams& params, const PagedAttentionPlan& plan, float* workspace,
                             cudaStream_t stream);
void launch_attention_prefill(const PagedAttentionParams& params, const PagedAttentionPlan& plan, cudaStream_t stream);

namespace gpu {

// Consecutive tokens of one sequence, or of none.
struct StepTile {
  std::int32_t token = 0;        // first, of the step
  std::int32_t sequence = 0;     // valid where position >= 0
  std::int32_t index = 0;        // of the first token among the sequence's tokens of the step
  std::int32_t count = 0;        // 0 or less: nothing to do
  std::int32_t step_tokens = 0;  // of the whole sequence
  std::int32_t position = -1;    // of the first token; -1: the tokens see nothing
  bool of_sequence = false;      // tokens before the first and behind the last sequence belong to none
};

// Tokens [place * tile_tokens, ...) of section k: 0 is what stands before the first sequence, k sequence k - 1, the last one padding.
HETKV_DEVICE_INLINE StepTile tile_of_section(const PagedAttentionParams& params, std::int64_t begin, std::int64_t section,
                                             std::int64_t place, std::int32_t tile_tokens) {
  StepTile tile;
  const bool padding = section == 0 || section > params.num_sequences;
  std::int64_t end = section > params.num_sequences ? params.num_tokens : params.cu_seqlens_q[section];
  end = end < params.num_tokens ? end : params.num_tokens;
  const std::int64_t first = place * tile_tokens, left = end - begin - first;
  tile.token = static_cast<std::int32_t>(begin + first);
  tile.index = static_cast<std::int32_t>(first);
  tile.count = static_cast<std::int32_t>(left < tile_tokens ? left : tile_tokens);
  tile.step_tokens = static_cast<std::int32_t>(end - begin);
  tile.of_sequence = !padding;
  if (padding || left <= 0) return tile;
  tile.sequence = static_cast<std::int32_t>(section - 1);
  const std::int64_t first_position = params.seqused_k[tile.sequence] - (end - begin);
  if (first_position >= 0) tile.position = static_cast<std::int32_t>(first_position + first);
  return tile;
}

HETKV_DEVICE_INLINE std::int64_t section_begin(const PagedAttentionParams& params, std::int64_t section) {
  const std::int64_t begin = section == 0 ? 0 : params.cu_seqlens_q[section - 1];
  return begin < 0 ? 0 : begin < params.num_tokens ? begin : params.num_tokens;
}

// The section whose tiles hold `task`: those of section k begin at floor(begin / tile_tokens) + k, which leaves room for all of them.
// Tasks: num_tokens / tile_tokens + num_sequences + 2.
HETKV_DEVICE_INLINE StepTile tile_of_task(const PagedAttentionParams& params, std::int64_t task, std::int32_t tile_tokens) {
  std::int64_t low = 1, high = params.num_sequences + 2;  // section 0 begins at task 0
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (section_begin(params, middle) / tile_tokens + middle <= task) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const std::int64_t section = low - 1, begin = section_begin(params, section);
  return tile_of_section(params, begin, section, task - (begin / tile_tokens + section), tile_tokens);
}

HETKV_DEVICE_INLINE StepTile tile_of_sequence(const PagedAttentionParams& params, std::int64_t sequence, std::int64_t place,
                                              std::int32_t tile_tokens) {
  return tile_of_section(params, section_begin(params, sequence + 1), sequence + 1, place, tile_tokens);
}

// A tile of one token.
HETKV_DEVICE_INLINE StepTile tile_of_token(const PagedAttentionParams& params, std::int64_t token) {
  std::int64_t low = 1, high = params.num_sequences + 2;  // the first section that begins behind the token
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (section_begin(params, middle) <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  const std::int64_t begin = section_begin(params, low - 1);
  return tile_of_section(params, begin, low - 1, token - begin, 1);
}

// Keys [begin, end) of a tile, as far as the table reaches, and where they are.
struct TileKeys {
  const std::int32_t* table;
  std::int32_t last_block;  // the last offset whose rows are inside the arena
  std::int32_t begin, end;
  std::int32_t shift;

  // The block of a key that the tile reads; -1: not one of them, or outside the arena.
  HETKV_DEVICE_INLINE std::int32_t block_of(std::int32_t key) const {
    if (key < begin || key >= end) return -1;
    const std::int32_t block = table[key >> shift];
    return block <= last_block ? block : -1;
  }
};

HETKV_DEVICE_INLINE std::int32_t last_block_inside(const PagedRows& rows) {
  const std::int64_t end = rows.data_offset + (rows.data_bytes << rows.block_shift);
  const std::int64_t last = (rows.arena_bytes - end) >> kBlockOffsetShift;  // below 0 where not one block fits
  return static_cast<std::int32_t>(last < INT32_MAX ? last : INT32_MAX);
}

HETKV_DEVICE_INLINE TileKeys keys_of(const PagedAttentionParams& params, const StepTile& tile) {
  TileKeys keys{nullptr, -1, 0, 0, params.keys.block_shift};
  if (tile.position < 0) return keys;
  const std::int32_t of_keys = last_block_inside(params.keys), of_values = last_block_inside(params.values);
  keys.last_block = of_keys < of_values ? of_keys : of_values;
  keys.table = params.table.blocks + tile.sequence * params.table.stride;
  const std::int64_t reach = static_cast<std::int64_t>(params.table.columns) << keys.shift;
  const std::int64_t end = static_cast<std::int64_t>(tile.position) + tile.count;
  keys.begin = static_cast<std::int32_t>(first_key(params, tile.position));
  keys.end = static_cast<std::int32_t>(end < reach ? end : reach);
  return keys;
}

// 16 bytes of a stored vector. block -1: from a place that is mapped, for a copy of 0 bytes.
HETKV_DEVICE_INLINE const std::byte* chunk_source(const PagedRows& rows, const PagedAttentionParams& params, std::int32_t block,
                                                  std::int32_t key, std::int32_t vector_offset) {
  if (block < 0) return params.query;
  const std::int64_t row = key & ((1 << rows.block_shift) - 1);
  return rows.arena + (static_cast<std::int64_t>(block) << kBlockOffsetShift) + rows.data_offset + row * rows.data_bytes +
         vector_offset;
}

// Whether the row at `position` sees `key`.
HETKV_DEVICE_INLINE bool sees(std::int32_t position, std::int32_t window, std::int32_t key) {
#ifdef HETKV_PLANT_WINDOW_OF_ONE_MORE
  return key <= position && (window == 0 || key >= position - window);
#else
  return key <= position && (window == 0 || key > position - window);
#endif
}

}  // namespace gpu
}  // namespace hetkv
