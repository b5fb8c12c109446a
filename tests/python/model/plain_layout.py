"""Cache layouts as plain data, and R(p) by listing tokens. No hetkv here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Retention = Literal["history", "window", "tail", "snapshot"]

__all__ = ["PlainGroup", "PlainLayout", "Retention"]


@dataclass(frozen=True)
class PlainGroup:
    """One cache group. ratio: tokens per entry (tail: of the compressor it feeds). window: counts the query."""

    name: str
    kind: str
    retention: Retention
    ratio: int = 1
    window: int = 0
    overlap_rows: int = 0
    indexes: str = ""


@dataclass(frozen=True)
class PlainLayout:
    """block_size: tokens per block, of every group."""

    name: str
    block_size: int
    groups: tuple[PlainGroup, ...]

    @property
    def history(self) -> list[PlainGroup]:
        return [g for g in self.groups if g.retention == "history"]

    @property
    def points(self) -> list[PlainGroup]:
        """In the order of the checks."""
        return [g for kind in ("window", "tail", "snapshot") for g in self.groups if g.retention == kind]

    @property
    def staged(self) -> list[PlainGroup]:
        """Groups whose state an engine has to hand over at a boundary."""
        return [g for g in self.points if g.retention != "window"]

    def rows(self, group: PlainGroup, p: int) -> range:
        """The rows of R(p): entries of a history, tokens of a window or tail; a snapshot has none."""
        if p <= 0 or group.retention == "snapshot":
            return range(0)
        if group.retention == "history":
            return range(p // group.ratio)
        if group.retention == "window":
            return range(max(0, p - (group.window - 1)), p)
        return range(p // group.ratio * group.ratio, p)

    def overlap(self, group: PlainGroup, p: int) -> int:
        return group.overlap_rows if p >= group.ratio else 0

    def objects(self, group: PlainGroup, depth: int) -> list[int]:
        """Depths of the nodes whose object of a point group R(depth * block_size) asks for, deepest first."""
        p = depth * self.block_size
        if p == 0:
            return []
        if group.retention == "snapshot":
            return [depth]
        if group.retention == "tail":
            return [depth] if self.rows(group, p) or self.overlap(group, p) else []
        return sorted({row // self.block_size + 1 for row in self.rows(group, p)}, reverse=True)

    def has_block(self, group: PlainGroup, depth: int) -> bool:
        """Whether the node at this depth stores a block of a history group: an entry closes inside its tokens."""
        begin, end = (depth - 1) * self.block_size, depth * self.block_size
        return end // group.ratio > begin // group.ratio

    def table_blocks(self, group: PlainGroup, tokens: int) -> int:
        """Entries of a block table that covers the first ``tokens`` tokens, whole blocks."""
        blocks = -(-tokens // self.block_size)
        if group.retention == "window":
            return blocks
        return sum(self.has_block(group, depth) for depth in range(1, blocks + 1))
