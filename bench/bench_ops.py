"""Speed of the ops, each beside a baseline in the same run: microseconds, GB/s or GFLOP/s, and the ratio.

    python bench/bench_ops.py [--only attention,index,...] [--threads 1] [--repeats 9] [--json FILE]

Medians; an op and its baseline take turns, so that a busy machine slows both. Baselines are torch's own operators on the same
work, or plain eager code where torch has none; for bytes moved, Tensor.copy_ and a sum over the same bytes (the read sweep).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from ops import attention, blocks, compress, index, row_copy, write
from ops.timing import Line
from provenance import provenance

import hetkv.ops

FAMILIES = {
    "attention": attention.lines,
    "index": index.lines,
    "compress": compress.lines,
    "blocks": blocks.lines,
    "write": write.lines,
}


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*FAMILIES, "copy"]), help="families, separated by commas")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="cuda: row copies only, so far")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the lines to FILE (results/ops.json is in RESULTS.md)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    load = [round(value, 2) for value in os.getloadavg()]
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, level {hetkv.ops.cpu_level()}")
    lines: list[Line] = []
    for name in args.only.split(","):
        if name == "copy":
            row_copy.report(args.device, args.repeats)
            continue
        for line in FAMILIES[name](args.repeats):
            lines.append(line)
            print(line.text(), flush=True)
    if args.json is not None:
        facts = {"level": hetkv.ops.cpu_level(), "threads": args.threads, "torch": torch.__version__}
        document = {**provenance(), "load_before": load, **facts, "lines": [vars(line) for line in lines]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
