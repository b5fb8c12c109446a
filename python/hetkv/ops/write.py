"""Writing the new rows of a step into blocks, with norm, rotation and quantisation on the way."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_arena, check_beside, check_symbolic, register_fake

__all__ = ["write_key_value", "write_rows"]


def write_rows(
    arena: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    rows_per_block: int,
    section_offset: int,
    entry_format: str,
    scale_offset: int = 0,
    norm_weight: Tensor | None = None,
    norm_eps: float = 1e-6,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rope_interleaved: bool = True,
    rope_trailing: bool = True,
) -> None:
    """Writes row ``i``, normed and rotated if asked, to slot ``slots[i]`` in the stored format.

    Order, in float32: RMS norm over the width (times ``norm_weight``), rotation, rounding to the format. Packed formats round to
    bfloat16 first, then quantise groups with power-of-two scales; all machines write the same bytes for the same float32 row.

    Args:
        arena: ``uint8[bytes]``, contiguous, written; its address is a multiple of 16.
        rows: ``[n, width]`` or ``[n, heads, width]``, float32, float16 or bfloat16; width up to 1,024, contiguous. Heads of a row
            are stored one after the other.
        slots: ``int64[n]``: ``block_offset * rows_per_block + row``, block offsets in units of 256 bytes; -1: not written.
        rows_per_block: rows of the section; a power of two.
        section_offset: bytes from a block's start to row 0 of this layer's field.
        entry_format: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"fp8_packed"`` (width - 64 e4m3 in groups of 64, then 64
            bfloat16), ``"fp8_index"`` (e4m3, one float32 scale) or ``"mxfp4_index"`` (e2m1, a ue8m0 scale per 32).
        scale_offset: as section_offset, of the scales of packed formats.
        norm_weight: float32 ``[width]``; None: no norm.
        cos, sin: float32 ``[n, rope / 2]``; None: no rotation. ``(a, b) -> (a cos - b sin, b cos + a sin)``.
        rope_interleaved: pairs are neighbours; else ``(i, i + rope / 2)``.
        rope_trailing: the last ``rope`` values are rotated; else the first.

    Raises:
        ValueError: a wrong argument; on the CPU also a slot outside the arena, before anything is written.
    """
    torch.ops.hetkv.write_rows(
        arena,
        rows,
        slots,
        rows_per_block=rows_per_block,
        section_offset=section_offset,
        entry_format=entry_format,
        scale_offset=scale_offset,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        cos=cos,
        sin=sin,
        rope_interleaved=rope_interleaved,
        rope_trailing=rope_trailing,
    )


def write_key_value(
    arena: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    rows_per_block: int,
    key_offset: int,
    value_offset: int,
    entry_format: str,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    rope_interleaved: bool = False,
    rope_trailing: bool = True,
) -> None:
    """Writes separate keys and values, ``[n, heads, head dim]`` each, to the same slots of two sections. Only keys are rotated.

    key_offset, value_offset: as ``section_offset`` of ``write_rows``. entry_format: float32, float16 or bfloat16. All else, and
    errors, as ``write_rows``.
    """
    torch.ops.hetkv.write_key_value(
        arena,
        key,
        value,
        slots,
        rows_per_block=rows_per_block,
        key_offset=key_offset,
        value_offset=value_offset,
        entry_format=entry_format,
        cos=cos,
        sin=sin,
        rope_interleaved=rope_interleaved,
        rope_trailing=rope_trailing,
    )


def _check_rows(op: str, arena: Tensor, name: str, rows: Tensor, slots: Tensor) -> None:
    check_arena(op, arena)
    check(rows.ndim in (2, 3), op, f"{name}.ndim = {rows.ndim}: expected 2 or 3")
    check(rows.device == arena.device, op, f"{name}.device = {rows.device}: expected {arena.device}, where arena is")
    check_beside(arena, op, ndim=1, dtype=torch.int64, slots=slots)
    check_symbolic(slots.shape[0] == rows.shape[0], lambda: f"{op}: slots.size(0) = {slots.shape[0]}: expected {rows.shape[0]}")


def _write_rows(arena: Tensor, rows: Tensor, slots: Tensor, **_settings: object) -> None:
    _check_rows("write_rows", arena, "rows", rows, slots)


def _write_key_value(arena: Tensor, key: Tensor, value: Tensor, slots: Tensor, **_settings: object) -> None:
    _check_rows("write_key_value", arena, "key", key, slots)
    _check_rows("write_key_value", arena, "value", value, slots)


register_fake("hetkv::write_rows", _write_rows)
register_fake("hetkv::write_key_value", _write_key_value)
for _op in ("write_rows", "write_key_value"):
    refuse_gradients(_op)
