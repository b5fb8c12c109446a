// Partial results of sparse attention, one for each split of a token's keys, and how they become one.
#pragma once

#include "kernels/cuda/sparse_keys.cuh"

namespace hetkv::gpu {

// [token][split][head]: 512 weighted sums, then for all of them (largest score, sum of weights), in base 2. A split without keys has the sum
// 0 and leaves its weighted sums unwritten. Borrows the workspace.
struct SparseParts {
  float* sums = nullptr;
  float2* states = nullptr;
  std::int64_t splits = 1;

  HETKV_DEVICE_INLINE std::int64_t index(const SparseAttentionParams& params, std::int64_t token, std::int64_t split,
                                         int head) const {
    return (token * splits + split) * params.heads + head;
  }
  HETKV_DEVICE_INLINE float* out(const SparseAttentionParams& params, std::int64_t token, std::int64_t split, int head) const {
    return sums + index(params, token, split, head) * kSparseTileValues;
  }
  HETKV_DEVICE_INLINE float2* state(const SparseAttentionParams& params, std::int64_t token, std::int64_t split, int head) const {
    return states + index(params, token, split, head);
  }
};

inline SparseParts sparse_parts(const SparseAttentionParams& params, float* workspace) {
  SparseParts parts;
  parts.splits = sparse_splits(params);
  if (parts.splits == 1) return parts;
  parts.sums = workspace;
  parts.states = reinterpret_cast<float2*>(workspace + params.num_tokens * parts.splits * params.heads * kSparseTileValues);
  return parts;
}

// 512 values, output in 16 bits.
void combine_sparse_parts(const SparseAttentionParams& params, const SparseParts& parts, cudaStream_t stream);

}  // namespace hetkv::gpu
