"""Rows of groups inside the arena: addresses from the layout, bytes by ``torch.ops.hetkv``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import _core, ops
from .errors import ArgumentError

__all__ = ["ArenaRows", "SlotInput"]

SlotInput: TypeAlias = "npt.NDArray[Any] | Tensor | Sequence[int]"


class ArenaRows:
    """Reads and writes rows of one arena. Owns nothing: the arena tensor and the layout belong to the cache.

    Thread-safe as far as the rows differ. No call waits for the device.
    """

    def __init__(self, layout: _core.CacheLayout, arena: Tensor) -> None:
        self._layout = layout
        self._arena = arena
        self._dtypes = {field.dtype: getattr(torch, field.dtype.name) for group in layout.groups for field in group.fields}

    def read(self, group: str | int, field: str, slots: SlotInput, out: Tensor | None = None) -> Tensor:
        g, f = self._find(group, field)
        where = self._slots(slots)
        shape = (len(g.layers), where.numel(), *f.shape)
        if out is None:
            out = torch.empty(shape, dtype=self._dtypes[f.dtype], device=self._arena.device)
        else:
            self._check(out, "out", f, shape)
        if where.numel() > 0:
            ops.gather_rows(out, self._arena, where, **_geometry(g, f))
        return out

    def write(self, group: str | int, field: str, slots: SlotInput, rows: Tensor) -> None:
        g, f = self._find(group, field)
        where = self._slots(slots)
        self._check(rows, "rows", f, (len(g.layers), where.numel(), *f.shape))
        if where.numel() > 0:
            ops.scatter_rows(self._arena, rows, where, **_geometry(g, f))

    def read_block(self, group: str | int, field: str, offset: int, rows: int | None = None) -> Tensor:
        _, f = self._find(group, field)
        return self.read(group, field, self._block_slots(f, offset, f.rows_per_block if rows is None else rows))

    def write_block(self, group: str | int, field: str, offset: int, rows: Tensor) -> None:
        _, f = self._find(group, field)
        if rows.ndim < 2:
            raise ArgumentError("rows.ndim", str(rows.ndim), "[layers, rows, *field shape]")
        self.write(group, field, self._block_slots(f, offset, rows.shape[1]), rows)

    def _find(self, group: str | int, field: str) -> tuple[_core.Group, _core.Field]:
        g = self._layout.group(group)
        return g, g.field(field)

    def _block_slots(self, field: _core.Field, offset: int, rows: int) -> Tensor:
        if not 0 <= rows <= field.rows_per_block:
            raise ArgumentError("rows", str(rows), f"0 to {field.rows_per_block}: what a block has of field {field.name!r}")
        first = offset * field.rows_per_block
        return torch.arange(first, first + rows, dtype=torch.int64, device=self._arena.device)

    def _slots(self, slots: SlotInput) -> Tensor:
        if isinstance(slots, np.ndarray) and not slots.flags.writeable:
            slots = slots.copy()  # torch has no read-only tensors, and warns
        where = torch.as_tensor(slots, device=self._arena.device)
        if where.ndim != 1:
            raise ArgumentError("slots.ndim", str(where.ndim), "1")
        if where.dtype != torch.int64:
            if where.is_floating_point() or where.dtype == torch.bool:
                if where.numel() == 0:  # an empty list has no integers to tell its type by
                    return where.to(torch.int64)
                raise ArgumentError("slots.dtype", str(where.dtype), "torch.int64")
            where = where.to(torch.int64)
        return where.contiguous()

    def _check(self, rows: Tensor, argument: str, field: _core.Field, shape: tuple[int, ...]) -> None:
        if tuple(rows.shape) != shape:
            raise ArgumentError(f"{argument}.shape", str(tuple(rows.shape)), f"{shape}: [layers, slots, *field shape]")
        if rows.dtype != self._dtypes[field.dtype]:
            raise ArgumentError(f"{argument}.dtype", str(rows.dtype), f"{self._dtypes[field.dtype]}, of field {field.name!r}")
        if rows.device != self._arena.device:
            raise ArgumentError(f"{argument}.device", str(rows.device), f"{self._arena.device}, where the arena is")


def _geometry(group: _core.Group, field: _core.Field) -> dict[str, int]:
    return {"rows_per_block": field.rows_per_block, "section_offset": field.section_offset, "layer_stride": group.layer_stride}
