"""Reads bench/results: hetkv alone, and the rounds in which systems took turns."""

from __future__ import annotations

import json
import statistics
from typing import Any

from provenance import RESULTS

Json = dict[str, Any]


def load(name: str) -> Json | None:
    """bench/results/<name>.json, or None if it was not made yet."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return None
    content: Json = json.loads(path.read_text())
    return content


class Own:
    """Rows of hetkv_bench alone."""

    def __init__(self, content: Json) -> None:
        self.content = content
        self.rows: list[Json] = content["bench"]["results"]

    def row(self, case: str, layout: str, block: int, tokens: int = 0, threads: int = 1) -> Json | None:
        """The first that fits; `tokens` 0 fits all."""
        for row in self.rows:
            same = (row["case"], row["layout"], row["block"], row["threads"]) == (case, layout, block, threads)
            if same and tokens in (0, row["tokens"]):
                return row
        return None

    def us(self, case: str, layout: str, block: int, tokens: int = 0) -> float | None:
        """Median of that row in microseconds."""
        row = self.row(case, layout, block, tokens)
        return None if row is None else row["median_ns"] / 1e3


class Rounds:
    """Measurements of all systems that took turns; microseconds, but for `replay` (requests/s) and `hit_rate`."""

    def __init__(self, content: Json) -> None:
        self.rounds: list[Json] = content["rounds"]

    def blocks(self) -> list[int]:
        """Block sizes, largest first."""
        return sorted({one["block"] for one in self.rounds}, reverse=True)

    def systems(self, block: int) -> list[str]:
        """In order of appearance."""
        names: dict[str, None] = {}
        for one in self.rounds:
            if one["block"] == block:
                names.update(dict.fromkeys(m["system"] for m in one["measurements"]))
        return list(names)

    def median(self, system: str, case: str, block: int, tokens: int = 0) -> float | None:
        """Over rounds."""
        values = [v for one in self.rounds if (v := _in_round(one, system, case, block, tokens)) is not None]
        return statistics.median(values) if values else None

    def ratio(self, peer: str, own: str, case: str, block: int, tokens: int = 0) -> float | None:
        """How many times longer `peer` takes: the median of the ratios inside each round."""
        ratios = []
        for one in self.rounds:
            theirs, ours = _in_round(one, peer, case, block, tokens), _in_round(one, own, case, block, tokens)
            if theirs is not None and ours:
                ratios.append(theirs / ours)
        return statistics.median(ratios) if ratios else None


def _in_round(one: Json, system: str, case: str, block: int, tokens: int) -> float | None:
    """The median where a system ran more than once in a round."""
    wanted = (system, case, block, tokens)
    values = [m["value"] for m in one["measurements"] if (m["system"], m["case"], m["block"], m["tokens"]) == wanted]
    return statistics.median(values) if values else None
