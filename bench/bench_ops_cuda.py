"""Speed of the CUDA ops beside what this card can do: its measured copy bandwidth (bytes read and written) and bf16 matmul rate.

    python bench/bench_ops_cuda.py [--only paged_attention,...] [--seconds 45] [--json FILE]

One line a case: microseconds of a call inside a captured graph, GB/s or TFLOP/s, the share of the card's own rate, and the share
that is aimed at, where there is an aim. Ops without a CUDA kernel are named. `--device cpu --smallest` only shows that the cases
work. Cases that would begin after `--seconds` are left out and named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ops.device_cases import Bench, Case, cases
from provenance import provenance

import hetkv.ops  # noqa: F401  # the ops are asked for by name

Run = Callable[[], object]


def microseconds(runs: list[Run], device: str, repeats: int = 5) -> float:
    """Median time of one call: as many calls as take some milliseconds, in one graph, between two events."""
    for run in runs:
        run()
    if device == "cpu":
        begin = time.perf_counter()
        runs[0]()
        return (time.perf_counter() - begin) * 1e6
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(call: Run) -> float:
        begin_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        return begin_event.elapsed_time(end_event) * 1e3

    torch.cuda.synchronize()
    once = min(timed(run) for run in runs)
    calls = max(len(runs), min(200, int(4000 / max(once, 1.0))) // len(runs) * len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            runs[i % len(runs)]()
    timed(graph.replay)
    return statistics.median(timed(graph.replay) for _ in range(repeats)) / calls


def copy_rate(bench: Bench) -> float:
    """Bytes read and written a second by Tensor.copy_ of 2 GiB."""
    source = torch.ones(bench.size(2**31, 2**16), dtype=torch.uint8, device=bench.device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / microseconds([lambda: target.copy_(source)], bench.device) * 1e6


def matmul_rate(bench: Bench) -> float:
    """Operations a second of a bf16 product of two square matrices of random values."""
    n = bench.size(8192, 64)
    a, b = bench.randn(n, n), bench.randn(n, n)
    return 2.0 * n**3 / microseconds([lambda: a @ b], bench.device) * 1e6


def measure(case: Case, rates: dict[str, float], device: str) -> dict[str, Any]:
    """The line of one case."""
    taken = microseconds(case.runs, device)
    rate = case.amount / taken * 1e6
    unit, scale = ("GB/s", 1e9) if case.bound == "copy" else ("TFLOP/s", 1e12)
    share = rate / rates[case.bound]
    aim = "" if case.target is None else f"  aim {case.target:.0%}: {'reached' if share >= case.target else 'BELOW'}"
    text = f"{case.op:<16} {case.name:<64} {taken:>9.1f} us {rate / scale:>8.1f} {unit:<7} {share:>6.1%} of {case.bound}{aim}"
    print(text, flush=True)
    return {
        "op": case.op, "case": case.name, "microseconds": taken, "rate": rate, "bound": case.bound, "share": share,
        "aim": case.target,
    }  # fmt: skip


def main() -> int:
    """Prints one line per case. 1 if an op failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="ops, separated by commas")
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench_ops_cuda.py: this torch sees no CUDA device")
        return 1
    torch.manual_seed(0)
    begin = time.monotonic()
    bench = Bench(args.device, args.smallest)
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    rates = {"copy": copy_rate(bench), "matmul": matmul_rate(bench)}
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{card}, torch {torch.__version__}, {today}: copies {rates['copy'] / 1e9:,.0f} GB/s (read and written), "
          f"bf16 matmul {rates['matmul'] / 1e12:,.0f} TFLOP/s")  # fmt: skip
    lines, missing, late, failed = [], set(), 0, 0
    key = "CUDA" if args.device == "cuda" else "CPU"
    with torch.inference_mode():
        for op, make in cases(bench):
            if args.only and op not in args.only.split(","):
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"hetkv::{op}", key):
                missing.add(op)
                continue
            if time.monotonic() - begin > args.seconds:
                late += 1
                continue
            try:
                lines.append(measure(make(), rates, args.device))
            except Exception as error:  # one case must not cost the others their turn
                failed += 1
                print(f"{op:<16} FAILED: {error}", flush=True)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    for op in sorted(missing):
        print(f"{op:<16} no {key} kernel")
    if late:
        print(f"{late} cases left out after {args.seconds:.0f} seconds")
    if args.json is not None:
        facts = {**provenance(), "card": card, "torch": torch.__version__, "rates": rates, "without_kernel": sorted(missing)}
        args.json.write_text(json.dumps({**facts, "lines": lines}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
