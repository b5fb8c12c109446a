"""Timing of things that take turns, so that a busy machine slows all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Line:
    """One measured case. amount: bytes or operations of one call, in `unit`s of 1e9 a second."""

    case: str
    microseconds: float
    amount: float
    unit: str  # "GB/s" or "GFLOP/s"
    baseline: str
    ratio: float  # the baseline's time over ours

    def text(self) -> str:
        rate = self.amount / self.microseconds / 1e3
        return f"{self.case:<52} {self.microseconds:>10.1f} us {rate:>8.2f} {self.unit:<8} {self.ratio:>7.2f} x {self.baseline}"


def seconds(run: Run, device: str) -> float:
    """Wall time of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def medians(runs: dict[str, Run], device: str, repeats: int) -> dict[str, float]:
    """Median seconds by name; the runs take turns, and the first round, which touches the pages, is dropped."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for name, run in runs.items():
                taken = seconds(run, device)
                if repeat > 0:
                    times[name].append(taken)
    return {name: statistics.median(taken) for name, taken in times.items()}


def beside(case: str, ours: Run, baseline: str, theirs: Run, *, amount: float, unit: str, device: str, repeats: int) -> Line:
    """One case beside its baseline, in turns."""
    taken = medians({"ours": ours, "theirs": theirs}, device, repeats)
    return Line(case, taken["ours"] * 1e6, amount, unit, baseline, taken["theirs"] / taken["ours"])
