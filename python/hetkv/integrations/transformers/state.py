"""Rows of a live transformers cache, named as hetkv names them, and back.

A `StateAdapter` knows one model family. It exports rows of a `DynamicCache` by hetkv group and field, and fills a fresh
`DynamicCache` with rows so that the next forward pass computes the same bits as the cache that the rows came from.

Shapes. Every exported tensor is `[layers, rows, *field shape]`: layers in the order of the group's owner layers, rows in
the group's own unit (history: entries of `ratio` tokens; window and tail: tokens; snapshot: one row). Batch is always 1.
Exported tensors are fresh and contiguous; imported ones are copied, so later writes on either side cannot meet.

The adapter never calls `crop`, `reorder_cache`, `reset` or the batch operations: several of them silently skip the
compressor's state, and `crop` on a compressed layer gives wrong logits without an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

Rows = dict[str, Tensor]
"""Field name to `[layers, rows, *field shape]`."""

PrefixState = dict[str, Rows]
"""Group name to the rows that resuming at one position needs."""


class UnsupportedModelError(ValueError):
    """The model, cache or input is one that this integration cannot serve. The text says what and why."""


class Retention(Enum):
    """Which rows of a group a resume at p reads."""

    HISTORY = "history"
    WINDOW = "window"
    TAIL = "tail"
    SNAPSHOT = "snapshot"


@dataclass(frozen=True)
class GroupState:
    """One cache group as transformers holds it.

    ratio: tokens per entry (history), or per window of the compressor that the tail feeds.
    window: W, counting the query; 0 unless retention is WINDOW.
    overlap_rows: half rows of the last closed window that a tail carries; 0 elsewhere.
    layers: owner layers, ascending, as indices into `cache.layers`.
    fields: the field names, in order.
    """

    name: str
    retention: Retention
    layers: tuple[int, ...]
    fields: tuple[str, ...]
    ratio: int = 1
    window: int = 0
    overlap_rows: int = 0

    def need(self, position: int) -> tuple[int, int]:
        """Rows `[begin, end)` that resuming at `position` (tokens) reads, in this group's own rows."""
        if self.retention is Retention.HISTORY:
            return 0, position // self.ratio
        if self.retention is Retention.WINDOW:
            return max(0, position - self.window + 1), position
        if self.retention is Retention.TAIL:
            return position - position % self.ratio, position
        return (0, 1) if position > 0 else (0, 0)


def stack_rows(parts: list[Tensor]) -> Tensor:
    """Stacks one `[rows, *shape]` tensor per layer to a fresh contiguous `[layers, rows, *shape]`."""
    return torch.stack(parts)


class StateAdapter(ABC):
    """Exports and imports the cache state of one model family. Stateless after construction; thread-safe for reads.

    Does not own the model or any cache. `groups` lists the groups in the order in which hetkv's layout lists them.
    """

    groups: tuple[GroupState, ...]

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self._by_name = {group.name: group for group in self.groups}

    def group(self, name: str) -> GroupState:
        """The group called `name`. KeyError if the family has none."""
        return self._by_name[name]

    def new_cache(self) -> DynamicCache:
        """A fresh, empty cache with this model's own layer classes."""
        return DynamicCache(config=self.config)

    def length(self, cache: DynamicCache) -> int:
        """Tokens that `cache` holds."""
        return int(cache.get_seq_length())

    @abstractmethod
    def export_history(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        """Entries `[begin, end)` of a history group."""

    def export_window(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:  # noqa: ARG002
        """Rows of tokens `[begin, end)` of a window group. Only the last W-1 tokens exist: ValueError for older ones."""
        raise UnsupportedModelError(f"{type(self).__name__} has no window group {group.name!r}")

    def export_tail(self, cache: DynamicCache, group: GroupState) -> Rows:  # noqa: ARG002
        """The unfinished compressor window at the cache's length, and its overlap rows if there are any yet."""
        raise UnsupportedModelError(f"{type(self).__name__} has no tail group {group.name!r}")

    def export_snapshot(self, cache: DynamicCache, group: GroupState) -> Rows:  # noqa: ARG002
        """The whole state at the cache's length, as one row."""
        raise UnsupportedModelError(f"{type(self).__name__} has no snapshot group {group.name!r}")

    def export_point(self, cache: DynamicCache, group: GroupState) -> Rows:
        """Tail or snapshot at the cache's length."""
        if group.retention is Retention.TAIL:
            return self.export_tail(cache, group)
        if group.retention is Retention.SNAPSHOT:
            return self.export_snapshot(cache, group)
        raise ValueError(f"group {group.name!r} is no point group of one position")

    def export_state(self, cache: DynamicCache) -> PrefixState:
        """Everything that resuming at the cache's present length needs, R(length)."""
        position = self.length(cache)
        state: PrefixState = {}
        if position == 0:  # nothing was ever written, so nothing is needed
            return state
        for group in self.groups:
            begin, end = group.need(position)
            if group.retention is Retention.HISTORY:
                state[group.name] = self.export_history(cache, group, begin, end)
            elif group.retention is Retention.WINDOW:
                state[group.name] = self.export_window(cache, group, begin, end)
            else:
                state[group.name] = self.export_point(cache, group)
        return state

    @abstractmethod
    def fill(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        """Fills a fresh `cache` with the state at `position` > 0 tokens.

        `state` names every group that R(position) asks for. Tensors are copied. Raises ValueError for a cache that is not
        empty and for missing or wrong-sized rows.
        """

    def restore(self, position: int, state: Mapping[str, Rows]) -> DynamicCache:
        """A new cache that holds the state at `position` tokens; empty for 0."""
        cache = self.new_cache()
        if position > 0:
            self.fill(cache, position, state)
        return cache

    def _take(self, state: Mapping[str, Rows], group: GroupState, field: str, rows: int) -> Tensor:
        """`[layers, rows, *shape]` of one field, checked; ValueError if missing or of another size."""
        try:
            tensor = state[group.name][field]
        except KeyError:
            raise ValueError(f"the state lacks field {field!r} of group {group.name!r}") from None
        if tensor.shape[0] != len(group.layers) or tensor.shape[1] != rows:
            raise ValueError(
                f"group {group.name!r}, field {field!r}: expected {len(group.layers)} layers x {rows} rows, "
                f"got {tensor.shape[0]} x {tensor.shape[1]}"
            )
        return tensor.to(self.device)


def require_empty(cache: DynamicCache) -> None:
    """ValueError unless nothing was ever written to `cache`."""
    if int(cache.get_seq_length()) != 0:
        raise ValueError("the cache already holds tokens; state is only imported into a fresh one")


def window_slice(rows: Tensor, length: int, begin: int, end: int) -> Tensor:
    """Rows of tokens `[begin, end)` out of `rows` = the last `rows.shape[0]` of `length` tokens.

    ValueError if older rows than those are asked for.
    """
    first = length - rows.shape[0]
    if begin < first or end > length:
        raise ValueError(f"window rows [{begin}, {end}) asked for, but the cache holds [{first}, {length})")
    return rows[begin - first : end - first]
