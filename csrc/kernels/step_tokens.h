// Which tokens of a step belong to which sequence, and their positions: for every params struct with cu_seqlens_q, seqused_k,
// num_tokens and num_sequences. Reads the tables where they are, so a kernel calls it with device memory.
#pragma once

#include <cstdint>

#include "kernels/host_device.h"

namespace hetkv {

// The tokens [first_token, first_token + count) of one sequence, the first of them at first_position. Empty for padding.
struct StepTokens {
  std::int64_t first_token = 0;
  std::int64_t count = 0;
  std::int64_t first_position = 0;
};

template <typename Params>
HETKV_HOST_DEVICE inline StepTokens step_tokens(const Params& params, std::int64_t sequence) {
  const std::int64_t first = params.cu_seqlens_q[sequence];
  const std::int64_t count = params.cu_seqlens_q[sequence + 1] - first;
  const std::int64_t position = params.seqused_k[sequence] - count;
  const bool real = first >= 0 && count > 0 && position >= 0 && first + count <= params.num_tokens;
  return {first, real ? count : 0, position};
}

// The sequence that a token belongs to, or num_sequences if none. cu_seqlens_q must not fall.
template <typename Params>
HETKV_HOST_DEVICE inline std::int64_t sequence_of(const Params& params, std::int64_t token) {
  std::int64_t low = 0, high = params.num_sequences;  // the first sequence that ends behind the token
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (params.cu_seqlens_q[middle + 1] > token) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

}  // namespace hetkv
