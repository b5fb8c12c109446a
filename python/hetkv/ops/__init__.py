"""The ops of hetkv on tensors, as typed functions. Importing this package loads the library and registers ``torch.ops.hetkv``.

Every op works on CPU and CUDA tensors, under ``torch.compile(fullgraph=True)`` and on meta tensors. No op waits for the device;
none has a derivative. Wrong arguments raise ``ValueError`` with the op's and the argument's name.

Each module has the functions of one family, with their fake kernels.
"""

from .cpu_level import cpu_level
from .row_copy import gather_rows, scatter_rows

__all__ = ["cpu_level", "gather_rows", "scatter_rows"]
