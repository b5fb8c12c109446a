"""Row copies beside torch's own copies of the same bytes: GB/s of bytes copied.

`order`: with `blocks` the rows of each block come in order (a prefill, a restore) and blocks are shuffled, with `rows` single
rows are shuffled. `index` is torch.index_select (gather) or index_copy_ (scatter) on the same rows as one dense tensor; `copy` is
Tensor.copy_ of contiguous bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import hetkv.ops

from .timing import Run, medians

UNIT = 256
ROWS_PER_BLOCK = 64


def measure(row_bytes: int, layers: int, order: str, *, mib: int, device: str, repeats: int) -> dict[str, float]:
    """GB/s by name for one shape: `mib` MiB in all, over `layers` layers."""
    n = mib * 2**20 // (row_bytes * layers) // ROWS_PER_BLOCK * ROWS_PER_BLOCK
    blocks = n // ROWS_PER_BLOCK
    layer_stride = ROWS_PER_BLOCK * row_bytes
    block_units = layers * layer_stride // UNIT
    arena = torch.zeros(blocks * block_units * UNIT, dtype=torch.uint8, device=device)
    row = torch.arange(ROWS_PER_BLOCK)
    slots = (torch.randperm(blocks)[:, None] * block_units * ROWS_PER_BLOCK + row).flatten()
    if order == "rows":
        slots = slots[torch.randperm(n)]
    block, row = slots // (block_units * ROWS_PER_BLOCK), slots % ROWS_PER_BLOCK
    dense_index = (block * ROWS_PER_BLOCK + row).to(device)
    slots = slots.to(device)
    packed = torch.ones(layers, n, row_bytes, dtype=torch.uint8, device=device)
    dense = torch.zeros_like(packed)
    geometry = {"rows_per_block": ROWS_PER_BLOCK, "section_offset": 0, "layer_stride": layer_stride}

    def wide(tensor: Tensor) -> Tensor:
        return tensor.view(torch.int64)  # torch copies 8 bytes an element

    runs: dict[str, Run] = {
        "scatter": lambda: hetkv.ops.scatter_rows(arena, packed, slots, **geometry),
        "scatter index": lambda: wide(dense).index_copy_(1, dense_index, wide(packed)),
        "gather": lambda: hetkv.ops.gather_rows(packed, arena, slots, **geometry),
        "gather index": lambda: torch.index_select(wide(dense), 1, dense_index, out=wide(packed)),
        "copy": lambda: dense.copy_(packed),
    }
    return {name: packed.numel() / taken / 1e9 for name, taken in medians(runs, device, repeats).items()}


def report(device: str, repeats: int, mib: int = 64) -> None:
    """Prints one line per shape."""
    names = ["scatter", "scatter index", "gather", "gather index", "copy"]
    print(f"row copies of {mib} MiB, GB/s")
    print(f"{'row bytes':>9} {'layers':>6} {'order':>6} " + " ".join(f"{name:>13}" for name in names))
    for row_bytes, layers in [(128, 8), (584, 8), (1024, 8), (1024, 1), (4096, 8)]:
        for order in ("blocks", "rows"):
            result = measure(row_bytes, layers, order, mib=mib, device=device, repeats=repeats)
            print(f"{row_bytes:>9} {layers:>6} {order:>6} " + " ".join(f"{result[name]:>13.2f}" for name in names), flush=True)
