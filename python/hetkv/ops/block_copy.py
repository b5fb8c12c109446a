"""Copying blocks, or a part of them, inside an arena (copy on write) or between two (staging)."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_beside, register_fake

__all__ = ["copy_blocks", "transfer_blocks"]


def copy_blocks(arena: Tensor, source: Tensor, target: Tensor, *, num_bytes: int, begin: int = 0) -> None:
    """Copies bytes ``[begin, begin + num_bytes)`` of block ``source[i]`` to the same place of block ``target[i]``.

    The two parts of a pair may overlap: the target ends with what the source held. No pair may write what another one reads or
    writes; sources may be shared.

    Args:
        arena: ``uint8[bytes]``, contiguous, written.
        source, target: int32 ``[n]``, offsets in units of 256 bytes.

    Raises:
        ValueError: a wrong argument; on the CPU also a part outside the arena, or pairs that depend on each other, before any
            byte is written. On CUDA pairs with a part outside are skipped, and what comes of dependent pairs is open.
    """
    torch.ops.hetkv.copy_blocks(arena, source, target, num_bytes=num_bytes, begin=begin)


def transfer_blocks(
    target_arena: Tensor, source_arena: Tensor, source: Tensor, target: Tensor, *, num_bytes: int, begin: int = 0
) -> None:
    """As ``copy_blocks``, from blocks of one arena to blocks of another on the same device; they must not share memory."""
    torch.ops.hetkv.transfer_blocks(target_arena, source_arena, source, target, num_bytes=num_bytes, begin=begin)


def _check_pairs(op: str, arena: Tensor, source: Tensor, target: Tensor) -> None:
    check(arena.ndim == 1, op, f"arena.ndim = {arena.ndim}: expected 1")
    check(arena.dtype == torch.uint8, op, f"arena.dtype = {arena.dtype}: expected torch.uint8")
    check_beside(arena, op, ndim=1, dtype=torch.int32, source=source, target=target)


def _copy_blocks(arena: Tensor, source: Tensor, target: Tensor, **_settings: int) -> None:
    _check_pairs("copy_blocks", arena, source, target)


def _transfer_blocks(target_arena: Tensor, source_arena: Tensor, source: Tensor, target: Tensor, **_settings: int) -> None:
    _check_pairs("transfer_blocks", target_arena, source, target)
    check_beside(target_arena, "transfer_blocks", ndim=1, dtype=torch.uint8, source_arena=source_arena)


register_fake("hetkv::copy_blocks", _copy_blocks)
register_fake("hetkv::transfer_blocks", _transfer_blocks)
for _op in ("copy_blocks", "transfer_blocks"):
    refuse_gradients(_op)
