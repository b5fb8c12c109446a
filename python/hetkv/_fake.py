"""Fake kernels: what ``torch.compile`` and meta tensors see instead of the real ops.

The copies return nothing, so a fake only checks, in the same order as the real op, what can be checked without memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetkv import _library  # noqa: F401  # the schemas must be there first

_check_symbolic: Callable[..., None] = torch._check  # sizes may be symbols: this also teaches the tracer
_register_fake: Callable[..., Any] = torch.library.register_fake


def _check(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{op}: {message}")


def _check_copy(op: str, name: str, packed: Tensor, arena: Tensor, slots: Tensor) -> None:
    _check(arena.ndim == 1, op, f"arena.ndim = {arena.ndim}: expected 1")
    _check(packed.ndim >= 2, op, f"{name}.ndim = {packed.ndim}: expected at least 2")
    _check(slots.ndim == 1, op, f"slots.ndim = {slots.ndim}: expected 1")
    _check(packed.device == arena.device, op, f"{name}.device = {packed.device}: expected {arena.device}, where arena is")
    _check(slots.device == arena.device, op, f"slots.device = {slots.device}: expected {arena.device}, where arena is")
    _check(arena.dtype == torch.uint8, op, f"arena.dtype = {arena.dtype}: expected torch.uint8")
    _check(slots.dtype == torch.int64, op, f"slots.dtype = {slots.dtype}: expected torch.int64")
    rows, entries = packed.shape[1], slots.shape[0]
    _check_symbolic(
        entries == rows, lambda: f"{op}: slots.size(0) = {entries}: expected {rows}, the size of {name} in dimension 1"
    )


def _scatter_rows(arena: Tensor, rows: Tensor, slots: Tensor, *_geometry: int, **_more_geometry: int) -> None:
    _check_copy("scatter_rows", "rows", rows, arena, slots)


def _gather_rows(out: Tensor, arena: Tensor, slots: Tensor, *_geometry: int, **_more_geometry: int) -> None:
    _check_copy("gather_rows", "out", out, arena, slots)


_register_fake("hetkv::scatter_rows", _scatter_rows)
_register_fake("hetkv::gather_rows", _gather_rows)
