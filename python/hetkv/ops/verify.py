"""Checks of blocks where they lie: place, alignment, padding, checksum, non-finite values."""

from enum import IntFlag

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_beside, register_fake

__all__ = ["BlockStatus", "checksum_blocks", "verify_blocks"]


class BlockStatus(IntFlag):
    """Bits of a block's status; 0: all checks passed."""

    OUTSIDE = 1
    """Not inside the arena; then nothing else was checked."""
    MISALIGNED = 2
    """Its address is no multiple of ``base_alignment``."""
    STRIDE = 4
    """``block_bytes`` is no multiple of ``stride_alignment``."""
    PADDING = 8
    """A byte of ``zero_ranges`` is not 0."""
    CHECKSUM = 16
    """Not the checksum given."""
    NOT_FINITE = 32
    """A value of ``finite_ranges`` is infinite or NaN."""


def verify_blocks(
    arena: Tensor,
    blocks: Tensor,
    *,
    block_bytes: int,
    checksums: Tensor | None = None,
    zero_ranges: Tensor | None = None,
    finite_ranges: Tensor | None = None,
    base_alignment: int = 1,
    stride_alignment: int = 1,
) -> Tensor:
    """Checks every block; nothing is raised for a bad one, and the host need not wait.

    Args:
        arena: ``uint8[bytes]``, contiguous.
        blocks: int32 ``[n]``, offsets in units of 256 bytes.
        block_bytes: bytes of a block.
        checksums: int64 ``[n]``, as from ``checksum_blocks``; None: not checked.
        zero_ranges: int64 ``[r, 2]``: bytes ``[begin, end)`` of every block that must be 0.
        finite_ranges: int64 ``[f, 3]``: begin, end and type: 0 float32, 1 float16, 2 bfloat16, 3 e4m3 (which has only NaN).
        base_alignment, stride_alignment: powers of two, in bytes.

    Returns:
        int32 ``[n]``: bits of ``BlockStatus``.

    Raises:
        ValueError: a wrong argument; on the CPU also a range outside the block, of an unknown type or of parts of values. On
            CUDA, where nobody looks at the ranges first, such a range is a failed check of every block: ``PADDING`` or
            ``NOT_FINITE``.
    """
    status: Tensor = torch.ops.hetkv.verify_blocks(
        arena,
        blocks,
        block_bytes=block_bytes,
        checksums=checksums,
        zero_ranges=zero_ranges,
        finite_ranges=finite_ranges,
        base_alignment=base_alignment,
        stride_alignment=stride_alignment,
    )
    return status


def checksum_blocks(arena: Tensor, blocks: Tensor, *, block_bytes: int) -> Tensor:
    """The 64-bit checksum of every block, int64 ``[n]``: the same on every machine, and that of persisted blocks.

    A change within one aligned 8-byte word is detected for certain; unrelated contents agree with probability about 2^-64. Some
    fixed changes to several words 512 bytes apart are never noticed: it guards against faults, not against people.
    ValueError for a block outside the arena on the CPU; on CUDA its checksum is 0.
    """
    sums: Tensor = torch.ops.hetkv.checksum_blocks(arena, blocks, block_bytes=block_bytes)
    return sums


def _check_blocks(op: str, arena: Tensor, blocks: Tensor) -> None:
    check(arena.ndim == 1, op, f"arena.ndim = {arena.ndim}: expected 1")
    check(arena.dtype == torch.uint8, op, f"arena.dtype = {arena.dtype}: expected torch.uint8")
    check_beside(arena, op, ndim=1, dtype=torch.int32, blocks=blocks)


def _verify_blocks(
    arena: Tensor,
    blocks: Tensor,
    *,
    checksums: Tensor | None = None,
    zero_ranges: Tensor | None = None,
    finite_ranges: Tensor | None = None,
    **_settings: int,
) -> Tensor:
    _check_blocks("verify_blocks", arena, blocks)
    check_beside(arena, "verify_blocks", ndim=1, dtype=torch.int64, checksums=checksums)
    check_beside(arena, "verify_blocks", ndim=2, dtype=torch.int64, zero_ranges=zero_ranges, finite_ranges=finite_ranges)
    return torch.empty_like(blocks)


def _checksum_blocks(arena: Tensor, blocks: Tensor, **_settings: int) -> Tensor:
    _check_blocks("checksum_blocks", arena, blocks)
    return torch.empty_like(blocks, dtype=torch.int64)


register_fake("hetkv::verify_blocks", _verify_blocks)
register_fake("hetkv::checksum_blocks", _checksum_blocks)
for _op in ("verify_blocks", "checksum_blocks"):
    refuse_gradients(_op)
