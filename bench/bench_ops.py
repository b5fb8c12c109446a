"""Speed of the row copies beside torch's own copies of the same bytes, in one run: GB/s of bytes copied.

    python bench/bench_ops.py [--device cpu] [--threads 2] [--mib 64] [--repeats 9]

`order`: with `blocks` the rows of each block come in order (a prefill, a restore) and blocks are shuffled, with `rows` single
rows are shuffled. `index` is torch.index_select (gather) or index_copy_ (scatter) on the same rows as one dense tensor; `copy` is
Tensor.copy_ of contiguous bytes. Medians; the copies take turns, so that a busy machine slows all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import hetkv.ops

UNIT = 256
ROWS_PER_BLOCK = 64


def seconds(run: Callable[[], object], device: str) -> float:
    """Wall time of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(row_bytes: int, layers: int, order: str, args: argparse.Namespace) -> dict[str, float]:
    """GB/s by name for one shape: `mib` MiB in all, over `layers` layers."""
    n = args.mib * 2**20 // (row_bytes * layers) // ROWS_PER_BLOCK * ROWS_PER_BLOCK
    blocks = n // ROWS_PER_BLOCK
    layer_stride = ROWS_PER_BLOCK * row_bytes
    block_units = layers * layer_stride // UNIT
    arena = torch.zeros(blocks * block_units * UNIT, dtype=torch.uint8, device=args.device)
    row = torch.arange(ROWS_PER_BLOCK)
    slots = (torch.randperm(blocks)[:, None] * block_units * ROWS_PER_BLOCK + row).flatten()
    if order == "rows":
        slots = slots[torch.randperm(n)]
    block, row = slots // (block_units * ROWS_PER_BLOCK), slots % ROWS_PER_BLOCK
    dense_index = (block * ROWS_PER_BLOCK + row).to(args.device)
    slots = slots.to(args.device)
    packed = torch.ones(layers, n, row_bytes, dtype=torch.uint8, device=args.device)
    dense = torch.zeros_like(packed)
    geometry = {"rows_per_block": ROWS_PER_BLOCK, "section_offset": 0, "layer_stride": layer_stride}

    def wide(tensor: Tensor) -> Tensor:
        return tensor.view(torch.int64)  # torch copies 8 bytes an element

    runs: dict[str, Callable[[], object]] = {
        "scatter": lambda: hetkv.ops.scatter_rows(arena, packed, slots, **geometry),
        "scatter index": lambda: wide(dense).index_copy_(1, dense_index, wide(packed)),
        "gather": lambda: hetkv.ops.gather_rows(packed, arena, slots, **geometry),
        "gather index": lambda: torch.index_select(wide(dense), 1, dense_index, out=wide(packed)),
        "copy": lambda: dense.copy_(packed),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                taken = seconds(run, args.device)
                if repeat > 0:  # the first round touches the pages
                    times[name].append(taken)
    return {name: packed.numel() / statistics.median(taken) / 1e9 for name, taken in times.items()}


def main() -> None:
    """Prints one line per shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mib", type=int, default=64, help="bytes of each copy, in MiB")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.mib} MiB a copy, GB/s")
    names = ["scatter", "scatter index", "gather", "gather index", "copy"]
    print(f"{'row bytes':>9} {'layers':>6} {'order':>6} " + " ".join(f"{name:>13}" for name in names))
    for row_bytes, layers in [(128, 8), (584, 8), (1024, 8), (1024, 1), (4096, 8)]:
        for order in ("blocks", "rows"):
            result = measure(row_bytes, layers, order, args)
            print(f"{row_bytes:>9} {layers:>6} {order:>6} " + " ".join(f"{result[name]:>13.2f}" for name in names), flush=True)


if __name__ == "__main__":
    main()
