// The schemas of every hetkv op, in one place. Names and argument order are a promise: they end up in exported graphs.
// What an op writes is marked in its schema, and cache writers return nothing.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(hetkv, m) {
  m.def("cpu_level() -> int");  // as base/cpu_level.h counts them
  m.def(
      "scatter_rows(Tensor(a!) arena, Tensor rows, Tensor slots, int rows_per_block, int section_offset, int layer_stride, "
      "int layer_begin=0) -> ()");
  m.def(
      "gather_rows(Tensor(a!) out, Tensor arena, Tensor slots, int rows_per_block, int section_offset, int layer_stride, "
      "int layer_begin=0) -> ()");
  m.def(
      "write_rows(Tensor(a!) arena, Tensor rows, Tensor slots, *, int rows_per_block, int section_offset, str entry_format, "
      "int scale_offset=0, Tensor? norm_weight=None, float norm_eps=1e-06, Tensor? cos=None, Tensor? sin=None, "
      "bool rope_interleaved=True, bool rope_trailing=True) -> ()");
  m.def(
      "write_key_value(Tensor(a!) arena, Tensor key, Tensor value, Tensor slots, *, int rows_per_block, int key_offset, "
      "int value_offset, str entry_format, Tensor? cos=None, Tensor? sin=None, bool rope_interleaved=False, "
      "bool rope_trailing=True) -> ()");
  m.def(
      "compress(Tensor(a!) arena, Tensor kv, Tensor gate, Tensor position_bias, Tensor norm_weight, Tensor cos, Tensor sin, "
      "Tensor cu_seqlens_q, Tensor seqused_k, Tensor ring_table, Tensor slots, *, int ratio, bool overlap, int ring_rows, "
      "int ring_kv_offset, int ring_gate_offset, int rows_per_block, int section_offset, str entry_format, int scale_offset=0, "
      "float norm_eps=1e-06) -> ()");
  m.def(
      "paged_attention(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, *, int "
      "num_kv_heads, "
      "int rows_per_block, int key_offset, int value_offset, str entry_format, float scale, int window=0, Tensor? sinks=None, "
      "float softcap=0.0) -> (Tensor, Tensor)");
  m.def(
      "index_scores(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, *, "
      "int ratio, int rows_per_block, int section_offset, str entry_format, int scale_offset=0) -> Tensor");
  m.def("top_k(Tensor scores, Tensor? counts, int k) -> Tensor");
  m.def(
      "select_entries(Tensor query, Tensor weights, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, *, "
      "int ratio, int rows_per_block, int section_offset, str entry_format, int k, int scale_offset=0) -> Tensor");
  m.def(
      "sparse_attention(Tensor query, Tensor arena, Tensor window_table, Tensor? entry_table, Tensor? selected, "
      "Tensor cu_seqlens_q, Tensor seqused_k, *, int window, int window_rows_per_block, int window_offset, str window_format, "
      "float scale, int window_scale_offset=0, int ratio=1, int entry_rows_per_block=1, int entry_offset=0, "
      "str entry_format='float32', int entry_scale_offset=0, Tensor? sinks=None, Tensor? cos=None, Tensor? sin=None, "
      "int value_dim=0) -> (Tensor, Tensor)");
  m.def(
      "block_scores(Tensor query, Tensor arena, Tensor block_table, Tensor cu_seqlens_q, Tensor seqused_k, *, "
      "int rows_per_block, int section_offset, str entry_format, int scale_offset=0, int routed_tokens=128, "
      "int local_blocks=1) -> Tensor");
  m.def(
      "block_sparse_attention(Tensor query, Tensor arena, Tensor block_table, Tensor selected_blocks, Tensor cu_seqlens_q, "
      "Tensor seqused_k, *, int num_kv_heads, int rows_per_block, int key_offset, int value_offset, str entry_format, "
      "float scale, int routed_tokens=128, Tensor? sinks=None) -> (Tensor, Tensor)");
  m.def(
      "verify_blocks(Tensor arena, Tensor blocks, *, int block_bytes, Tensor? checksums=None, Tensor? zero_ranges=None, "
      "Tensor? finite_ranges=None, int base_alignment=1, int stride_alignment=1) -> Tensor");
  m.def("checksum_blocks(Tensor arena, Tensor blocks, *, int block_bytes) -> Tensor");
  m.def("copy_blocks(Tensor(a!) arena, Tensor source, Tensor target, *, int num_bytes, int begin=0) -> ()");
  m.def(
      "transfer_blocks(Tensor(a!) target_arena, Tensor source_arena, Tensor source, Tensor target, *, int num_bytes, int "
      "begin=0) "
      "-> ()");
}
