"""Copying rows, bit by bit, between a packed tensor and the blocks of an arena."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_symbolic, register_fake

__all__ = ["gather_rows", "scatter_rows"]


def scatter_rows(
    arena: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    rows_per_block: int,
    section_offset: int,
    layer_stride: int,
    layer_begin: int = 0,
) -> None:
    """Copies packed rows into blocks: row ``i`` of every layer goes to slot ``slots[i]``.

    Layer ``l`` of row ``i`` lands at byte ``(slot // rows_per_block) * 256 + section_offset + (layer_begin + l) * layer_stride +
    (slot % rows_per_block) * row_bytes`` of the arena. No other byte is touched.

    Args:
        arena: ``uint8[bytes]``, contiguous, written. Its address is a multiple of 16 (of ``hetkv.Cache``: of 256).
        rows: ``[layers, n, *row_shape]``, any dtype. The ``row_shape`` dimensions are contiguous; the strides of the first two
            are free, also 0 (``expand``). Must not share memory with the arena.
        slots: ``int64[n]``, contiguous: ``block_offset * rows_per_block + row``, block offsets in units of 256 bytes. Slots that
            occur twice end with the bytes of any of their rows, or a mix; only padding at a scratch block should do that.
        rows_per_block: rows of one layer's section; a power of two.
        section_offset: bytes from the start of a layer's part of a block to the section.
        layer_stride: bytes from one layer's part of a block to the next.
        layer_begin: layer of the block that ``rows[0]`` belongs to.

    Raises:
        ValueError: a wrong argument, or a tensor that requires grad while grad mode is on. On the CPU also a slot whose row is
            not inside the arena, before anything is written. On CUDA such a slot is skipped: the host never reads slots.
    """
    torch.ops.hetkv.scatter_rows(arena, rows, slots, rows_per_block, section_offset, layer_stride, layer_begin)


def gather_rows(
    out: Tensor,
    arena: Tensor,
    slots: Tensor,
    *,
    rows_per_block: int,
    section_offset: int,
    layer_stride: int,
    layer_begin: int = 0,
) -> None:
    """Copies rows out of blocks: slot ``slots[i]`` of every layer goes to row ``i`` of ``out``. The inverse of ``scatter_rows``.

    Args:
        out: ``[layers, n, *row_shape]``, any dtype, written. The ``row_shape`` dimensions are contiguous; the strides of the
            first two are free, but rows must not overlap. Must not share memory with the arena.
        arena: ``uint8[bytes]``, contiguous, only read. Its address is a multiple of 16 (of ``hetkv.Cache``: of 256).
        slots: ``int64[n]``, contiguous, as for ``scatter_rows``; a slot may occur more than once.
        rows_per_block: rows of one layer's section; a power of two.
        section_offset: bytes from the start of a layer's part of a block to the section.
        layer_stride: bytes from one layer's part of a block to the next.
        layer_begin: layer of the block that ``out[0]`` takes.

    Raises:
        ValueError: as for ``scatter_rows``. On CUDA the row of a slot outside the arena keeps what ``out`` held.
    """
    torch.ops.hetkv.gather_rows(out, arena, slots, rows_per_block, section_offset, layer_stride, layer_begin)


def _check_copy(op: str, name: str, packed: Tensor, arena: Tensor, slots: Tensor) -> None:
    check(arena.ndim == 1, op, f"arena.ndim = {arena.ndim}: expected 1")
    check(packed.ndim >= 2, op, f"{name}.ndim = {packed.ndim}: expected at least 2")
    check(slots.ndim == 1, op, f"slots.ndim = {slots.ndim}: expected 1")
    check(packed.device == arena.device, op, f"{name}.device = {packed.device}: expected {arena.device}, where arena is")
    check(slots.device == arena.device, op, f"slots.device = {slots.device}: expected {arena.device}, where arena is")
    check(arena.dtype == torch.uint8, op, f"arena.dtype = {arena.dtype}: expected torch.uint8")
    check(slots.dtype == torch.int64, op, f"slots.dtype = {slots.dtype}: expected torch.int64")
    rows, entries = packed.shape[1], slots.shape[0]
    check_symbolic(
        entries == rows, lambda: f"{op}: slots.size(0) = {entries}: expected {rows}, the size of {name} in dimension 1"
    )


def _scatter_rows(arena: Tensor, rows: Tensor, slots: Tensor, *_geometry: int, **_more_geometry: int) -> None:
    _check_copy("scatter_rows", "rows", rows, arena, slots)


def _gather_rows(out: Tensor, arena: Tensor, slots: Tensor, *_geometry: int, **_more_geometry: int) -> None:
    _check_copy("gather_rows", "out", out, arena, slots)


register_fake("hetkv::scatter_rows", _scatter_rows)
register_fake("hetkv::gather_rows", _gather_rows)

for _op in ("scatter_rows", "gather_rows"):
    refuse_gradients(_op)
