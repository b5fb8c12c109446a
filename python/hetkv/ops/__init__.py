"""The ops of hetkv on tensors, as typed functions. Importing this package loads the library and registers ``torch.ops.hetkv``.

Every op works on CPU and CUDA tensors, under ``torch.compile(fullgraph=True)`` and on meta tensors. No op waits for the device;
none has a derivative. Wrong arguments raise ``ValueError`` with the op's and the argument's name.

Each module has the functions of one family, with their fake kernels.
"""

from .block_copy import copy_blocks, transfer_blocks
from .block_sparse_attention import block_scores, block_sparse_attention
from .compress import compress
from .cpu_level import CPU_LEVELS, cpu_level
from .index_scores import index_scores, select_entries, top_k
from .paged_attention import paged_attention
from .row_copy import gather_rows, scatter_rows
from .sparse_attention import sparse_attention
from .verify import BlockStatus, checksum_blocks, verify_blocks
from .write import write_key_value, write_rows

__all__ = [
    "CPU_LEVELS",
    "BlockStatus",
    "block_scores",
    "block_sparse_attention",
    "checksum_blocks",
    "compress",
    "copy_blocks",
    "cpu_level",
    "gather_rows",
    "index_scores",
    "paged_attention",
    "scatter_rows",
    "select_entries",
    "sparse_attention",
    "top_k",
    "transfer_blocks",
    "verify_blocks",
    "write_key_value",
    "write_rows",
]
