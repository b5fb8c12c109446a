"""The compressor of DeepSeek-V4: raw rows of a window of tokens pooled into one entry, stored in its block."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check_arena, check_beside, check_symbolic, register_fake

__all__ = ["compress"]


def compress(
    arena: Tensor,
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    ring_table: Tensor,
    slots: Tensor,
    *,
    ratio: int,
    overlap: bool,
    ring_rows: int,
    ring_kv_offset: int,
    ring_gate_offset: int,
    rows_per_block: int,
    section_offset: int,
    entry_format: str,
    scale_offset: int = 0,
    norm_eps: float = 1e-6,
) -> None:
    """Closes the windows that end in this step, then keeps the step's last raw rows in each sequence's ring.

    Per channel, the entry of window ``w`` is the softmax of ``gate + position_bias`` over the window's tokens times ``kv``; RMS
    norm, rotation and storing follow. With overlap a raw row has two halves: window ``w`` pools the first halves of the tokens of
    window ``w - 1`` and the second halves of its own. An entry has the same bits for every chunking of the prompt.

    Args:
        arena: ``uint8[bytes]``, written: entries and rings.
        kv, gate: ``[tokens, c]``, with overlap ``[tokens, 2 c]``; float32, float16 or bfloat16; c a multiple of 8 up to 1,024.
        position_bias: float32 ``[ratio, c or 2 c]``. norm_weight: float32 ``[c]``.
        cos, sin: float32 ``[tokens, rope / 2]``; row t is the rotation of the entry that token t closes: of the first position of
            its window.
        cu_seqlens_q: int32 ``[batch + 1]``. seqused_k: int32 ``[batch]``, tokens of each sequence after this step; 0: padding.
        ring_table: int32 ``[batch, 1]``: the block of each sequence's ring, in units of 256 bytes. Its rows, in the dtype of kv
        and
            without bias, are those of the last tokens, at position modulo ``ring_rows``.
        slots: int64 ``[tokens]``: where the entry that a token closes goes; -1: nowhere. Read only where a token closes a window.
        ratio: tokens per entry. ring_rows: a power of two, at least ratio, with overlap 2 x ratio.
        ring_kv_offset, ring_gate_offset: bytes from the ring block's start to its rows; multiples of 16.
        rows_per_block, section_offset, entry_format, scale_offset: of the entries, as for ``write_rows``.

    Raises:
        ValueError: a wrong argument; on the CPU also tables that leave the arena, before anything is written.
    """
    torch.ops.hetkv.compress(
        arena,
        kv,
        gate,
        position_bias,
        norm_weight,
        cos,
        sin,
        cu_seqlens_q,
        seqused_k,
        ring_table,
        slots,
        ratio=ratio,
        overlap=overlap,
        ring_rows=ring_rows,
        ring_kv_offset=ring_kv_offset,
        ring_gate_offset=ring_gate_offset,
        rows_per_block=rows_per_block,
        section_offset=section_offset,
        entry_format=entry_format,
        scale_offset=scale_offset,
        norm_eps=norm_eps,
    )


def _compress(
    arena: Tensor,
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    ring_table: Tensor,
    slots: Tensor,
    **_settings: object,
) -> None:
    op = "compress"
    check_arena(op, arena)
    check_beside(arena, op, ndim=2, kv=kv, gate=gate)
    check_beside(arena, op, ndim=2, dtype=torch.float32, position_bias=position_bias, cos=cos, sin=sin)
    check_beside(arena, op, ndim=1, dtype=torch.float32, norm_weight=norm_weight)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check_beside(arena, op, ndim=2, dtype=torch.int32, ring_table=ring_table)
    check_beside(arena, op, ndim=1, dtype=torch.int64, slots=slots)
    check_symbolic(slots.shape[0] == kv.shape[0], lambda: f"{op}: slots.size(0) = {slots.shape[0]}: expected {kv.shape[0]}")


register_fake("hetkv::compress", _compress)
refuse_gradients("compress")
