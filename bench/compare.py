"""hetkv_bench, alone or beside installed peers, in one run; then bench/RESULTS.md.

    python bench/compare.py                                          # hetkv alone
    python bench/compare.py --peers DRIVERS --vllm-python A/bin/python --sglang-python B/bin/python \\
        --trace conversation=FILE.jsonl.gz:400 --rounds 3

On a shared machine only figures of one run compare: the systems take turns, `--rounds` times, and RESULTS.md reports medians of
rounds and ratios inside rounds. `DRIVERS` is a folder with the peers' drivers (peer_tables.py says what they print).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_tables import DRIVERS, SLOW_DRIVERS, Driver, Measurement, run_driver
from provenance import ROOT, load_average, provenance, write_results
from render_results import render

Trace = tuple[str, Path, int]  # name, plain file, requests (0 = all)
SYSTEM_OF_LAYOUT = {"full": "hetkv", "full+window": "hetkv +window", "v4": "hetkv V4 groups"}
# A prefix admission by the allocator's caller includes hashing; peers' "lookup" does not.
CASES = ("warm_admit", "warm_admit_conversation", "probe", "cold_request", "churn", "decode_token", "decode_token_and_publish")


def run_bench(binary: Path, arguments: Sequence[str], stdin: Path | None = None) -> dict[str, Any]:
    """One run of hetkv_bench; its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(binary), *arguments, "--json", str(out)]
        with stdin.open() if stdin else Path(os.devnull).open() as source:
            subprocess.run(command, check=True, stdin=source, stdout=sys.stderr)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def measurements_of(result: dict[str, Any]) -> list[Measurement]:
    """The rows of hetkv_bench that have a counterpart among the peers, in microseconds."""
    return [
        Measurement(SYSTEM_OF_LAYOUT[row["layout"]], row["case"], row["block"], row["tokens"], row["median_ns"] / 1e3)
        for row in result["results"]
        if row["case"] in CASES
    ]


def unpacked(trace: str, folder: Path) -> Trace:
    """`NAME=FILE[:LIMIT]` as name, plain file and limit (0 = all)."""
    name, _, rest = trace.partition("=")
    file, _, limit = rest.rpartition(":") if rest.rpartition(":")[2].isdigit() else (rest, "", "0")
    source = Path(file)
    if source.suffix != ".gz":
        return name, source, int(limit)
    plain = folder / source.stem
    plain.write_bytes(gzip.decompress(source.read_bytes()))
    return name, plain, int(limit)


def replay(binary: Path, trace: Trace, block: int, layouts: str, retentions: str) -> list[dict[str, Any]]:
    """Rows of one trace at one block size."""
    name, file, limit = trace
    arguments = ["--replay", "-", "--name", name, "--limit", str(limit), "--block", str(block)]
    rows: list[dict[str, Any]] = run_bench(binary, [*arguments, "--layouts", layouts, "--retention", retentions], file)["results"]
    return rows


def compare(args: argparse.Namespace, traces: dict[str, Trace]) -> dict[str, Any]:
    """Rounds over all systems. Every round has all measurements of all systems, one after the other."""
    pythons = {"vllm": args.vllm_python, "sglang": args.sglang_python}

    def peer(driver: Driver, block: int, extra: list[str], replays: dict[str, Trace]) -> list[Measurement]:
        python = pythons[driver.environment]
        if python is None:
            return []
        found: list[Measurement] = []
        # A driver replays one trace a call, after everything else.
        for name, (_, file, limit) in replays.items() or {"": ("", Path(), 0)}.items():
            options = ["--trace", str(file), "--limit", str(limit or 10**6)] if name else []
            print(f"  {driver.script} {' '.join([*driver.arguments, *extra])} {name}", file=sys.stderr)
            for m in run_driver(driver, args.peers, python, block, [*extra, *options]):
                if m.case in {"replay", "hit_rate"}:
                    found.append(Measurement(m.system, f"{m.case} {name}", block, 0, m.value))
                elif name in {"", next(iter(replays), "")}:
                    found.append(m)
        return found

    rounds = []
    for number in range(args.rounds):
        for block in args.block:
            # Once at the smaller block: the ratios there are of the same kind and the peers take minutes.
            if block != args.block[0] and number > 0:
                continue
            print(f"round {number + 1}, block {block}, load {load_average()}", file=sys.stderr)
            before = load_average()
            found = measurements_of(run_bench(args.bench, ["--quick", "--only", "prefix,request", "--block", str(block)]))
            for driver in DRIVERS:
                # 128k for vLLM's plain manager, as a target names it; the others in the short form.
                whole = driver.arguments == ("full",) and driver.script == "bench_vllm.py" and block == args.block[0]
                extra = [] if whole else ["--quick"]
                found += peer(driver, block, extra, traces if number == 0 else {})
            if number == 0 and block == args.block[0]:
                for driver in SLOW_DRIVERS:
                    found += peer(driver, block, ["--quick"], traces)
            # hetkv once more: the machine's state may have changed while the peers ran.
            after = measurements_of(run_bench(args.bench, ["--quick", "--only", "prefix,request", "--block", str(block)]))
            rounds.append(
                {
                    "block": block,
                    "load_before": before,
                    "load_after": load_average(),
                    "measurements": [m.to_json() for m in [*found, *after]],
                }
            )
    return {"rounds": rounds}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=ROOT / "build" / "bench" / "bench" / "cpp" / "hetkv_bench")
    parser.add_argument("--peers", type=Path, help="folder with the peers' drivers")
    parser.add_argument("--vllm-python", type=Path, help="of the environment with vLLM and TokenSpeed")
    parser.add_argument("--sglang-python", type=Path, help="of the environment with SGLang")
    parser.add_argument(
        "--trace", action="append", default=[], metavar="NAME=FILE[:LIMIT]", help="request trace, plain or .gz; may repeat"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--block", type=int, nargs="+", default=[64, 16])
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of all that is measured; below 0 (root) on a busy machine, so that long operations are not cut",
    )
    parser.add_argument("--skip-own", action="store_true", help="keep bench/results/hetkv.json as it is")
    args = parser.parse_args()
    if not args.bench.exists():
        parser.error(f"{args.bench} is not there: run `make bench` first")
    # The results name a commit, so the binary must be of it.
    sources = [
        path
        for folder in ("csrc/base", "csrc/allocator", "bench/cpp")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".cpp"}
    ]
    built = args.bench.stat().st_mtime
    if newer := [path.name for path in sources if path.stat().st_mtime > built]:
        parser.error(f"{args.bench} is older than {newer[0]}: run `make bench` first")

    os.nice(args.nice)  # inherited by hetkv_bench and by the drivers
    origin = provenance()
    if not args.skip_own:
        before = load_average()
        own = run_bench(args.bench, [])
        write_results("hetkv", {"format": 1, **origin, "load_before": before, "bench": own})
    with tempfile.TemporaryDirectory() as folder:
        traces: dict[str, Trace] = {}
        for trace in args.trace:
            name, plain, limit = unpacked(trace, Path(folder))
            traces[name] = (name, plain, limit)
        if traces:
            rows = []
            for trace in traces.values():
                for block in args.block:
                    layouts = "full,full+window,v4" if block == args.block[0] else "full,full+window"
                    rows += [
                        {**row, "trace": trace[0]}
                        for row in replay(args.bench, trace, block, layouts, "adaptive,turn_ends,all,none")
                    ]
            write_results("replay", {"format": 1, **origin, "pool_blocks": 200_000, "results": rows})
        if args.peers:
            write_results("compare", {"format": 1, **origin, **compare(args, traces)})
    print(render())


if __name__ == "__main__":
    main()
