"""Rows between a transformers cache and hetkv's arena, for one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers.cache_utils import DynamicCache

from .state import GroupState, PrefixState, Retention, Rows, StateAdapter

if TYPE_CHECKING:
    from ... import Cache, Sequence


class RowStore:
    """Copies rows in and out, by the sequence's own slots. Owns nothing. One thread at a time, like the sequence."""

    def __init__(self, adapter: StateAdapter, store: Cache, sequence: Sequence) -> None:
        self._adapter = adapter
        self._store = store
        self._sequence = sequence

    def restore(self, position: int) -> DynamicCache:
        """A fresh transformers cache with R(position) read from the arena; empty at 0."""
        state: PrefixState = {}
        if position > 0:
            for group in self._adapter.groups:
                state[group.name] = self._read(group, position)
        return self._adapter.restore(position, state)

    def _read(self, group: GroupState, position: int) -> Rows:
        begin, end = group.need(position)
        if group.retention in (Retention.HISTORY, Retention.WINDOW):
            slots = self._sequence.slot_mapping(group.name, begin, end)
            return {field: self._store.read_rows(group.name, field, slots) for field in group.fields}
        offset = self._sequence.point_block(group.name)
        if offset is None:  # R(position) asks for nothing of it
            return {}
        rows = {}
        for field in group.fields:
            count = group.overlap_rows if field.startswith("overlap_") else end - begin
            rows[field] = self._store.read_block(group.name, field, offset, rows=count)
        return rows

    def write(self, cache: DynamicCache, begin: int, end: int) -> None:
        """Stores the rows of tokens `[begin, end)`, a part of one block, from `cache`, which holds `end` tokens.

        Of a window group with W - 1 < end - begin only the last W - 1 rows exist any more; no resume at a block boundary
        reads the others.
        """
        for group in self._adapter.groups:
            if group.retention is Retention.HISTORY:
                first, last = begin // group.ratio, end // group.ratio
                if first < last:
                    self._store_rows(group, first, last, self._adapter.export_history(cache, group, first, last))
            elif group.retention is Retention.WINDOW:
                first = max(begin, end - group.window + 1)
                self._store_rows(group, first, end, self._adapter.export_window(cache, group, first, end))

    def _store_rows(self, group: GroupState, first: int, last: int, rows: Rows) -> None:
        slots = self._sequence.slot_mapping(group.name, first, last)
        for field, values in rows.items():
            self._store.write_rows(group.name, field, slots, values)

    def write_point(self, cache: DynamicCache, position: int) -> None:
        """Stores tail and snapshot state at `position`, where `cache` stands, if the retention policy wants it there."""
        staged = self._sequence.stage_point(position)
        if not staged:
            return
        for name, offset in staged.items():
            group = self._adapter.group(name)
            for field, values in self._adapter.export_point(cache, group).items():
                if values.shape[1]:
                    self._store.write_block(name, field, offset, values)
        held = self._adapter.length(cache)
        self._sequence.commit_point(position, dict.fromkeys(staged, held))
