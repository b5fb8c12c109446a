// Sparse attention of any format and dimensions, in float.
#pragma once

#include <cuda_runtime.h>

#include "kernels/sparse_attention.h"

namespace hetkv::gpu {

void sparse_attention_rows(const SparseAttentionParams& params, cudaStream_t stream);

}  // namespace hetkv::gpu
