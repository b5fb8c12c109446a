// CUDA implementations of the ops in library.cpp. Built only with CUDA sources; loads under a torch without CUDA as well.
#include <torch/csrc/stable/library.h>

#include "ops/block_copy.h"
#include "ops/block_scores.h"
#include "ops/block_sparse_attention.h"
#include "ops/compress.h"
#include "ops/index_scores.h"
#include "ops/paged_attention.h"
#include "ops/row_copy.h"
#include "ops/sparse_attention.h"
#include "ops/top_k.h"
#include "ops/verify.h"
#include "ops/write.h"

STABLE_TORCH_LIBRARY_IMPL(hetkv, CUDA, m) {
  m.impl("block_scores", TORCH_BOX(&hetkv::ops::block_scores_cuda));
  m.impl("block_sparse_attention", TORCH_BOX(&hetkv::ops::block_sparse_attention_cuda));
  m.impl("checksum_blocks", TORCH_BOX(&hetkv::ops::checksum_blocks_cuda));
  m.impl("compress", TORCH_BOX(&hetkv::ops::compress_cuda));
  m.impl("copy_blocks", TORCH_BOX(&hetkv::ops::copy_blocks_cuda));
  m.impl("gather_rows", TORCH_BOX(&hetkv::ops::gather_rows_cuda));
  m.impl("index_scores", TORCH_BOX(&hetkv::ops::index_scores_cuda));
  m.impl("paged_attention", TORCH_BOX(&hetkv::ops::paged_attention_cuda));
  m.impl("scatter_rows", TORCH_BOX(&hetkv::ops::scatter_rows_cuda));
  m.impl("select_entries", TORCH_BOX(&hetkv::ops::select_entries_cuda));
  m.impl("sparse_attention", TORCH_BOX(&hetkv::ops::sparse_attention_cuda));
  m.impl("top_k", TORCH_BOX(&hetkv::ops::top_k_cuda));
  m.impl("transfer_blocks", TORCH_BOX(&hetkv::ops::transfer_blocks_cuda));
  m.impl("verify_blocks", TORCH_BOX(&hetkv::ops::verify_blocks_cuda));
  m.impl("write_key_value", TORCH_BOX(&hetkv::ops::write_key_value_cuda));
  m.impl("write_rows", TORCH_BOX(&hetkv::ops::write_rows_cuda));
}
