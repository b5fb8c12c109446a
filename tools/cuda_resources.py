#!/usr/bin/env python3
"""Compiles the CUDA kernels and reads what the assembler says about each: registers, spills, stack. No GPU is needed.

    tools/cuda_resources.py [--arch 80 90 120] [--nvcc PATH]

Every kernel must have a row in csrc/kernels/cuda/resources.toml, and keep to it. Exits with 1 if
one does not, or if a row fits none.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "kernels" / "cuda"
TABLE = KERNELS / "resources.toml"

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True)
class Kernel:
    """One compiled instantiation. Sizes in bytes; shared: static only."""

    name: str
    arch: str
    registers: int
    stack: int
    spills: int
    shared: int


@dataclass
class Limit:
    """One row of the table: kernels whose name has `kernel` in it."""

    kernel: str
    registers: int
    used: bool = False


def compile_report(nvcc: str, source: Path, arch: str) -> str:
    """What ptxas says about one source. Exits if it does not compile."""
    command = [
        nvcc,
        "-std=c++20",
        "-O3",
        "-cubin",
        f"-arch=sm_{arch}",
        "-Xptxas=-v",
        f"-I{ROOT / 'csrc'}",
        "-o",
        "/dev/null",
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{source.name} for sm_{arch}: {done.stderr}")
    return done.stderr + done.stdout


def kernels_of(report: str) -> Iterator[Kernel]:
    """The kernels of one report, demangled."""
    names = _ENTRY.findall(report)
    plain = subprocess.run(["c++filt"], input="\n".join(n for n, _ in names), capture_output=True, text=True, check=True)
    readable = dict(zip((n for n, _ in names), plain.stdout.splitlines(), strict=True))
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", report):
        entry, stack, used = _ENTRY.search(part), _STACK.search(part), _USED.search(part)
        if entry is None or stack is None or used is None:
            continue
        yield Kernel(
            readable[entry[1]],
            entry[2],
            int(used[1]),
            int(stack[1]),
            int(stack[2]) + int(stack[3]),
            int(used[2] or 0),
        )


def faults_of(kernel: Kernel, limits: list[Limit]) -> Iterator[str]:
    """What is wrong with one kernel."""
    limit = next((limit for limit in limits if limit.kernel in kernel.name), None)
    if limit is None:
        yield "no row in resources.toml"
        return
    limit.used = True
    if kernel.registers > limit.registers:
        yield f"{kernel.registers} registers, at most {limit.registers}"
    if kernel.spills or kernel.stack:
        yield f"{kernel.spills} bytes of spills, {kernel.stack} bytes of stack"


def main() -> int:
    """Compiles everything and prints one line per kernel."""
    parser = argparse.ArgumentParser(description="Registers, spills and stack of every CUDA kernel.")
    parser.add_argument("--arch", nargs="+", default=["90"], help="compute capabilities without the dot (default: 90)")
    parser.add_argument("--nvcc", default=shutil.which("nvcc") or "nvcc")
    arguments = parser.parse_args()
    rows = tomllib.loads(TABLE.read_text())["kernel"]
    limits = [Limit(row["name"], row["registers"]) for row in rows]
    bad = 0
    for source in sorted(KERNELS.glob("*.cu")):
        for arch in arguments.arch:
            for kernel in kernels_of(compile_report(arguments.nvcc, source, arch)):
                faults = list(faults_of(kernel, limits))
                bad += len(faults)
                short = kernel.name.replace("(anonymous namespace)::", "").removeprefix("void ")
                short = re.sub(r"\([\w:]+\)(?=\d)", "", short.rsplit("(", 1)[0])  # without arguments and casts of enumerators
                text = f"{kernel.arch} {kernel.registers:>4} registers {kernel.shared:>6} B shared  {short}"
                print(text + "".join(f"\n    WRONG: {fault}" for fault in faults), flush=True)
    for limit in limits:
        if not limit.used:
            bad += 1
            print(f"WRONG: the row {limit.kernel!r} fits no kernel")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
