// CPU implementations of the ops in library.cpp.
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

STABLE_TORCH_LIBRARY_IMPL(hetkv, CPU, m) {
  m.impl("scatter_rows", TORCH_BOX(&hetkv::ops::scatter_rows_cpu));
  m.impl("gather_rows", TORCH_BOX(&hetkv::ops::gather_rows_cpu));
  m.impl("write_rows", TORCH_BOX(&hetkv::ops::write_rows_cpu));
  m.impl("write_key_value", TORCH_BOX(&hetkv::ops::write_key_value_cpu));
  m.impl("compress", TORCH_BOX(&hetkv::ops::compress_cpu));
  m.impl("paged_attention", TORCH_BOX(&hetkv::ops::paged_attention_cpu));
  m.impl("index_scores", TORCH_BOX(&hetkv::ops::index_scores_cpu));
  m.impl("top_k", TORCH_BOX(&hetkv::ops::top_k_cpu));
  m.impl("select_entries", TORCH_BOX(&hetkv::ops::select_entries_cpu));
  m.impl("sparse_attention", TORCH_BOX(&hetkv::ops::sparse_attention_cpu));
  m.impl("block_scores", TORCH_BOX(&hetkv::ops::block_scores_cpu));
  m.impl("block_sparse_attention", TORCH_BOX(&hetkv::ops::block_sparse_attention_cpu));
  m.impl("verify_blocks", TORCH_BOX(&hetkv::ops::verify_blocks_cpu));
  m.impl("checksum_blocks", TORCH_BOX(&hetkv::ops::checksum_blocks_cpu));
  m.impl("copy_blocks", TORCH_BOX(&hetkv::ops::copy_blocks_cpu));
  m.impl("transfer_blocks", TORCH_BOX(&hetkv::ops::transfer_blocks_cpu));
}
