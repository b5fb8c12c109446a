// KvAllocator::prepare_step: one step of a whole batch. Plans with failure, commits without.
#include <algorithm>
#include <utility>

#include "allocator/kv_allocator.h"
#include "base/error.h"

namespace hetkv {
namespace {

bool has_table_of_blocks(const Group& group) {
  return group.spec.retention == Retention::kHistory || group.spec.retention == Retention::kWindow;
}

}  // namespace

// Everything a caller can get wrong, before the first change. Returns the tokens of the step.
std::size_t KvAllocator::check_step(std::span<const StepItem> items, const StepBuffers& buffers) {
  const std::uint64_t mark = next_mark_.fetch_add(1, std::memory_order_relaxed);
  std::size_t total = 0;
  for (const StepItem& item : items) {
    Sequence& s = *item.sequence;
    if (item.num_tokens < 0) throw ArgumentError("num_tokens", std::to_string(item.num_tokens), "0 or more");
    const std::int64_t upto = s.scheduled() + item.num_tokens;
    s.require_schedulable(upto);
    if (std::exchange(s.step_mark_, mark) == mark) throw ArgumentError("items", "a sequence twice", "each sequence once");
    for (const Group& group : layout_.groups()) {
      const StepBuffers::GroupArrays& out = buffers.groups[group.id];
      if (out.block_table == nullptr || !has_table_of_blocks(group)) continue;
      const std::size_t blocks =
          std::max(s.groups_[group.id].offsets.size(), static_cast<std::size_t>(table_blocks(group, s.whole_blocks(upto))));
      if (blocks > out.table_stride) {
        throw ArgumentError("table_stride", std::to_string(out.table_stride),
                            "at least " + std::to_string(blocks) + " blocks of group '" + group.spec.name + "'");
      }
    }
    total += static_cast<std::size_t>(item.num_tokens);
  }
  if (items.size() > buffers.padded_sequences) {
    throw ArgumentError("padded_sequences", std::to_string(buffers.padded_sequences),
                        "at least the " + std::to_string(items.size()) + " sequences of the step");
  }
  if (total > buffers.padded_tokens) {
    throw ArgumentError("padded_tokens", std::to_string(buffers.padded_tokens),
                        "at least the " + std::to_string(total) + " tokens of the step");
  }
  return total;
}

// All sequences' blocks in one reservation, or none; on success each has its bytes charged.
Refusal KvAllocator::reserve_step(std::span<const StepItem> items, Charge& charge) {
  BlockCounts need{};
  std::vector<std::uint64_t> bytes(items.size());
  std::uint64_t ticket = ~std::uint64_t{0};  // of the oldest in the batch
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Sequence& s = *items[i].sequence;
    const std::int64_t upto = s.scheduled() + items[i].num_tokens;
    ticket = std::min(ticket, s.ticket_);
    if (upto <= s.covered_) continue;
    const BlockCounts mine = s.growth(upto);
    bytes[i] = bytes_of(mine);
    for (std::size_t pool = 0; pool < layout_.pools().size(); ++pool) need[pool] += mine[pool];
  }
  if (bytes_of(need) == 0) return {};
  Refusal refusal;
  std::size_t charged = 0;
  while (charged < items.size() && !(refusal = charge_quota(bytes[charged], items[charged].sequence->space_))) ++charged;
  if (!refusal) refusal = reserve_blocks(need, ticket, charge);
  if (refusal) {
    while (charged-- > 0) return_quota(bytes[charged], items[charged].sequence->space_);
    return refusal;
  }
  for (std::size_t i = 0; i < items.size(); ++i) items[i].sequence->held_bytes_ += static_cast<std::int64_t>(bytes[i]);
  return {};
}

// Slots of tokens [begin, upto) from row `row` on, and the block table of batch row `index`.
void KvAllocator::fill_step(const Sequence& s, std::int64_t begin, std::int64_t upto, std::size_t index, std::size_t row,
                            const StepBuffers& buffers) const {
  for (const Group& group : layout_.groups()) {
    const StepBuffers::GroupArrays& out = buffers.groups[group.id];
    if (out.slots != nullptr) s.token_slots(group.id, begin, upto, out.slots + row);
    if (out.block_table == nullptr) continue;
    std::int32_t* table = out.block_table + index * out.table_stride;
    std::int32_t* const end = table + out.table_stride;
    if (has_table_of_blocks(group)) {
      const auto blocks = s.block_table(group.id);
      table = std::copy(blocks.begin(), blocks.end(), table);
    } else if (const std::int64_t live = s.live_block(group.id); live >= 0 && table != end) {
      *table++ = static_cast<std::int32_t>(live);
    }
    std::fill(table, end, static_cast<std::int32_t>(scratch(running_pool(group.id))));
  }
}

// Rows of no sequence have no tokens, and padded tokens write to scratch: never to slot -1.
void KvAllocator::pad_step(std::size_t sequences, std::size_t tokens, const StepBuffers& buffers) const {
  std::fill(buffers.cu_seqlens_q + sequences, buffers.cu_seqlens_q + buffers.padded_sequences + 1,
            static_cast<std::int32_t>(tokens));
  std::fill(buffers.seqused_k + sequences, buffers.seqused_k + buffers.padded_sequences, 0);
  for (const Group& group : layout_.groups()) {
    const StepBuffers::GroupArrays& out = buffers.groups[group.id];
    const std::uint32_t block = scratch(running_pool(group.id));
    const std::int64_t rows = group.spec.retention == Retention::kTail ? group.ring_entries : group.entries_per_block;
    if (out.slots != nullptr) std::fill(out.slots + tokens, out.slots + buffers.padded_tokens, std::int64_t{block} * rows);
    if (out.block_table != nullptr) {
      std::fill(out.block_table + sequences * out.table_stride, out.block_table + buffers.padded_sequences * out.table_stride,
                static_cast<std::int32_t>(block));
    }
  }
}

Refusal KvAllocator::prepare_step(std::span<const StepItem> items, const StepBuffers& buffers, StepStamp* stamps) {
  const std::size_t total = check_step(items, buffers);
  Charge charge;
  if (const Refusal refusal = reserve_step(items, charge)) return refusal;
  std::size_t row = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    Sequence& s = *items[i].sequence;
    const std::int64_t begin = s.scheduled(), upto = begin + items[i].num_tokens;
    if (upto > s.covered_) s.grow(upto, charge);
    stamps[i] = s.stamp_step(upto);
    buffers.cu_seqlens_q[i] = static_cast<std::int32_t>(row);
    buffers.seqused_k[i] = static_cast<std::int32_t>(upto);
    fill_step(s, begin, upto, i, row, buffers);
    row += static_cast<std::size_t>(items[i].num_tokens);
  }
  pad_step(items.size(), total, buffers);
  return {};
}

}  // namespace hetkv
