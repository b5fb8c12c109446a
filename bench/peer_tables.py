"""Runs peers' benchmark drivers and reads the Markdown tables that they print.

The drivers are not part of this repository: they need the peers' packages, each in an environment of its own. A driver prints a
line `### title`, a table, and nothing else that starts with `|`. `SYSTEMS` says which columns become which measurements.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Row = dict[str, str]
Table = tuple[str, list[Row]]


@dataclass(frozen=True)
class Measurement:
    """One number of one system. `value` is in microseconds, but for `replay` (requests per second) and `hit_rate`."""

    system: str
    case: str
    block: int
    tokens: int
    value: float

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return asdict(self)


@dataclass(frozen=True)
class Driver:
    """One call of a driver script."""

    script: str
    environment: str  # "vllm" or "sglang"
    arguments: tuple[str, ...]
    read: Callable[[Table, int], list[Measurement]]


def tables_of(text: str) -> list[Table]:
    """All tables of a driver's output, in order."""
    tables: list[Table] = []
    title, head = "", None
    for line in text.splitlines():
        if line.startswith("### "):
            title, head = line[4:].strip(), None
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if head is None:
                head = cells
                tables.append((title, []))
            elif not set(line) <= set("|-"):
                tables[-1][1].append(dict(zip(head, cells, strict=True)))
    return tables


def run_driver(driver: Driver, folder: Path, python: Path, block: int, extra: list[str]) -> list[Measurement]:
    """Runs one driver. Raises RuntimeError with the end of its output if it fails."""
    command = [str(python), "-W", "ignore", str(folder / driver.script), *driver.arguments, "--block", str(block), *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{driver.script} {' '.join(driver.arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [measurement for table in tables_of(done.stdout) for measurement in driver.read(table, block)]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _common(system: str, table: Table, block: int) -> list[Measurement]:
    """What all drivers print alike: churn and trace replay."""
    title, rows = table
    found = []
    if " churn" in title:
        found.append(Measurement(system, "churn", block, 32768, _number(rows[0]["total ms"]) * 1e3))
    elif "trace replay" in title:
        found.append(Measurement(system, "replay", block, 0, _number(rows[0]["requests/s"])))
        found.append(Measurement(system, "hit_rate", block, 0, _number(rows[0]["hit rate"])))
    return found


def _vllm(system: str) -> Callable[[Table, int], list[Measurement]]:
    def read(table: Table, block: int) -> list[Measurement]:
        found = _common(system, table, block)
        for row in table[1]:
            if "warm admit+free us" not in row:
                continue
            tokens = int(row["prompt"])
            hash_us = _number(row["hash ms"]) * 1e3  # its manager takes requests that are hashed already
            found += [
                Measurement(system, "cold_request", block, tokens, _number(row["cold admit ms"]) * 1e3),
                Measurement(system, "hash", block, tokens, hash_us),
                Measurement(system, "lookup", block, tokens, _number(row["lookup us"])),
                Measurement(system, "warm_admit", block, tokens, _number(row["warm admit+free us"]) + hash_us),
                Measurement(system, "decode_token", block, tokens, _number(row["decode us/tok"])),
            ]
        return found

    return read


def _sglang(system: str) -> Callable[[Table, int], list[Measurement]]:
    def read(table: Table, block: int) -> list[Measurement]:
        found = _common(system, table, block)
        for row in table[1]:
            if "lookup us (1 node)" not in row:
                continue
            tokens = int(row["prompt"])
            found += [
                Measurement(system, "cold_request", block, tokens, _number(row["cold admit ms"]) * 1e3),
                Measurement(system, "lookup", block, tokens, _number(row["lookup us (1 node)"])),
                Measurement(system, "warm_admit", block, tokens, _number(row["warm admit us"])),
            ]
        return found

    return read


def _tokenspeed(system: str) -> Callable[[Table, int], list[Measurement]]:
    def read(table: Table, block: int) -> list[Measurement]:
        found = _common(system, table, block)
        for row in table[1]:
            if "prefix hashes us" not in row:
                continue
            tokens = int(row["prompt"])
            found += [
                Measurement(system, "cold_request", block, tokens, _number(row["cold admit ms"]) * 1e3),
                Measurement(system, "warm_admit", block, tokens, _number(row["warm admit us"])),
            ]
        return found

    return read


DRIVERS = (
    Driver("bench_sglang.py", "sglang", ("radix",), _sglang("SGLang radix")),
    Driver("bench_sglang.py", "sglang", ("unified-rust",), _sglang("SGLang Rust")),
    Driver("bench_sglang.py", "sglang", ("unified-rust-swa",), _sglang("SGLang Rust +window")),
    Driver("bench_tokenspeed.py", "vllm", ("full",), _tokenspeed("TokenSpeed")),
    Driver("bench_tokenspeed.py", "vllm", ("hybrid",), _tokenspeed("TokenSpeed +window")),
    Driver("bench_vllm.py", "vllm", ("full",), _vllm("vLLM")),
    Driver("bench_vllm.py", "vllm", ("hybrid",), _vllm("vLLM +window")),
)
# Hashes every 4 tokens, so one round at one block size has to do.
SLOW_DRIVERS = (Driver("bench_vllm.py", "vllm", ("v4",), _vllm("vLLM V4 groups")),)
