"""The ops of hetkv on tensors, as typed functions. Importing this module loads the library and registers ``torch.ops.hetkv``.

Every op works on CPU and CUDA tensors, under ``torch.compile(fullgraph=True)`` and on meta tensors. No op waits for the device.
Wrong arguments raise ``ValueError`` with the op's and the argument's name.
"""

import torch
from torch import Tensor

from hetkv import _autograd, _fake, _library  # noqa: F401

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
