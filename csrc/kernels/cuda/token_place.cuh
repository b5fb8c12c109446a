// Where a token of a step stands, for every params struct that step_tokens.h reads, and which block has a row of its sequence.
#pragma once

#include "kernels/cuda/instructions.cuh"
#include "kernels/paged_rows.h"
#include "kernels/step_tokens.h"

namespace hetkv::gpu {

struct TokenPlace {
  std::int64_t sequence = 0;
  std::int64_t position = -1;  // -1: the token belongs to no sequence
};

template <typename Params>
HETKV_DEVICE_INLINE TokenPlace token_place(const Params& params, std::int64_t token) {
  TokenPlace place;
  place.sequence = sequence_of(params, token);
  if (place.sequence == params.num_sequences) return place;
  const StepTokens tokens = step_tokens(params, place.sequence);
  const std::int64_t step = token - tokens.first_token;
  if (step >= 0 && step < tokens.count) place.position = tokens.first_position + step;
  return place;
}

// The block that holds row `row`, or -1 where there is none inside the arena.
HETKV_DEVICE_INLINE int block_of_row(const PagedRows& rows, const BlockTable& table, std::int64_t sequence, std::int64_t row) {
  const std::int64_t column = row >> rows.block_shift;
  if (row < 0 || column >= table.columns) return -1;
  const int block = table.blocks[sequence * table.stride + column];
  return block_inside(rows, block) ? block : -1;
}

}  // namespace hetkv::gpu
