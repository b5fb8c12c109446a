"""Running rings of tail groups: filled when a request resumes, read when a checkpoint is published.

A published tail is compact: raw rows of the open window, and the first half of the last closed window, its gate with the bias
added (as transformers keeps it). A ring holds raw rows by position, gates without bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .... import ops

if TYPE_CHECKING:
    from .... import Cache, Sequence
    from ...._core import Group

_BLOCK_UNIT = 256  # bytes: block offsets count in these


class Rings:
    """Moves tail state between rings and published blocks of one cache.

    biases: gives tail group with overlap to its layers' position biases, float32 [layers, ratio, 2 * width], as the model has
    them now: weights may be loaded while it is attached. Owns nothing.
    """

    def __init__(self, cache: Cache, biases: Callable[[], dict[str, Tensor]]) -> None:
        self._cache = cache
        self._biases = biases
        self._groups = [group for group in cache.layout.groups if group.ring_entries]

    def restore(self, sequence: Sequence, position: int) -> None:
        """Fills the sequence's rings with what R(position) has, from the blocks it was admitted with; all else is zero.

        A replay rebuilds a tail that is not there: until then its entries are computed from these zeros, and thrown away.
        """
        for group in self._groups:
            ring = sequence.live_block(group.name)
            if ring is not None:
                self._cache.arena[ring * _BLOCK_UNIT :][: group.ring_block_bytes].zero_()
            block = sequence.point_block(group.name)
            if block is None:
                continue
            open_rows = position % group.compress_ratio
            if open_rows:
                for name in ("kv", "gate"):
                    rows = self._cache.read_block(group.name, name, block, rows=open_rows)
                    self._write(sequence, group, name, first=position - open_rows, rows=rows)
            if group.spec.overlap_rows and position >= group.compress_ratio:
                first = position - open_rows - group.compress_ratio
                bias = self._overlap_bias(group)
                for name in ("kv", "gate"):
                    half = self._cache.read_block(group.name, f"overlap_{name}", block, rows=group.spec.overlap_rows)
                    if name == "gate":
                        half = half - bias.to(half.dtype)
                    half = half.to(getattr(torch, group.field(name).dtype.name))
                    self._write(sequence, group, name, first=first, rows=torch.cat([half, torch.zeros_like(half)], dim=-1))

    def store(self, sequence: Sequence, position: int, staged: dict[str, int]) -> None:
        """Writes the tails at `position`, where the rings stand, into the staged blocks."""
        for group in self._groups:
            block = staged.get(group.name)
            if block is None:
                continue
            open_rows = position % group.compress_ratio
            if open_rows:
                for name in ("kv", "gate"):
                    rows = self._read(sequence, group, name, position - open_rows, open_rows)
                    self._cache.write_block(group.name, name, block, rows)
            if group.spec.overlap_rows and position >= group.compress_ratio:
                first = position - open_rows - group.compress_ratio
                bias = self._overlap_bias(group)
                for name in ("kv", "gate"):
                    rows = self._read(sequence, group, name, first, group.spec.overlap_rows)
                    half = rows[..., : rows.shape[-1] // 2]
                    if name == "gate":
                        half = (half.float() + bias).to(getattr(torch, group.field("overlap_gate").dtype.name))
                    self._cache.write_block(group.name, f"overlap_{name}", block, half.contiguous())

    def save(self, sequence: Sequence) -> list[tuple[Tensor, Tensor]]:
        """The sequence's rings as they stand: parts of the arena, and copies of them, for `put_back`."""
        parts = []
        for group in self._groups:
            block = sequence.live_block(group.name)
            if block is not None:
                ring = self._cache.arena[block * _BLOCK_UNIT :][: group.ring_block_bytes]
                parts.append((ring, ring.clone()))
        return parts

    @staticmethod
    def put_back(parts: list[tuple[Tensor, Tensor]]) -> None:
        """Undoes what was written into the rings since `save`. The sequence must not have been freed in between."""
        for ring, copy in parts:
            ring.copy_(copy)

    def _overlap_bias(self, group: Group) -> Tensor:
        bias = self._biases()[group.name]
        return bias[..., : bias.shape[-1] // 2]

    def _slots(self, sequence: Sequence, group: Group, name: str, first: int, count: int) -> Tensor:
        ring = sequence.live_block(group.name)
        if ring is None:
            raise RuntimeError(f"group {group.name!r}: the sequence was admitted without live_state")
        rows = group.field(name).ring_rows
        positions = torch.arange(first, first + count, dtype=torch.int64, device=self._cache.device)
        slots: Tensor = ring * rows + positions % rows
        return slots

    def _geometry(self, group: Group, name: str) -> dict[str, int]:
        field = group.field(name)
        return {
            "rows_per_block": field.ring_rows,
            "section_offset": field.ring_section_offset,
            "layer_stride": group.ring_layer_stride,
        }

    def _write(self, sequence: Sequence, group: Group, name: str, *, first: int, rows: Tensor) -> None:
        slots = self._slots(sequence, group, name, first, rows.shape[1])
        ops.scatter_rows(self._cache.arena, rows, slots, **self._geometry(group, name))

    def _read(self, sequence: Sequence, group: Group, name: str, first: int, count: int) -> Tensor:
        field = group.field(name)
        dtype = getattr(torch, field.dtype.name)
        rows = torch.empty((len(group.layers), count, *field.shape), dtype=dtype, device=self._cache.device)
        slots = self._slots(sequence, group, name, first, count)
        ops.gather_rows(rows, self._cache.arena, slots, **self._geometry(group, name))
        return rows
