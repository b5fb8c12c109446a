"""Sparse-routed attention of DeepSeek-V4: a window of raw rows and compressed entries in one softmax; keys are values."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check_arena, check_beside, register_fake

__all__ = ["sparse_attention"]


def sparse_attention(
    query: Tensor,
    arena: Tensor,
    window_table: Tensor,
    entry_table: Tensor | None,
    selected: Tensor | None,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    window: int,
    window_rows_per_block: int,
    window_offset: int,
    window_format: str,
    scale: float,
    window_scale_offset: int = 0,
    ratio: int = 1,
    entry_rows_per_block: int = 1,
    entry_offset: int = 0,
    entry_format: str = "float32",
    entry_scale_offset: int = 0,
    sinks: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a ragged batch over the rows of the last ``window`` tokens and over entries. Both must be written first.

    The token at position p sees window rows ``[max(0, p - window + 1), p]`` and the entries of its row of ``selected``, or,
    without it, all of ``[0, (p + 1) // ratio)``. A sink is one more score of a head without a value. The last values of the
    output are
    rotated by the inverse of ``cos, sin``. Accumulates in float32. A token's result has the same bits for every batch, chunking
    and number of threads.

    Args:
        query: ``[tokens, heads, dim]``, float32, float16 or bfloat16, contiguous, dim up to 512; rows and entries have one head.
        arena: ``uint8[bytes]``, only read.
        window_table, entry_table: int32 ``[batch, columns]``, as ``block_table`` of ``paged_attention``; entry_table None: no
            entries.
        selected: int32 ``[tokens, k]``, -1: none, as from ``select_entries``; taken in its order.
        cu_seqlens_q, seqused_k: as for ``paged_attention``.
        window: counts the query, at least 1. ratio: tokens per entry.
        window_rows_per_block ... entry_scale_offset: of the two sections, as for ``write_rows``; any format.
        sinks: float32 ``[heads]``. cos, sin: float32 ``[tokens, rope / 2]``, of the tokens' positions.

    Returns:
        out, as query, and lse, float32 ``[tokens, heads]``, without the sink. Tokens of no sequence: 0 and -inf.

    Raises:
        ValueError: a wrong argument; on the CPU also a block outside the arena, or a selected entry that its token does not see.
    """
    result: tuple[Tensor, Tensor] = torch.ops.hetkv.sparse_attention(
        query,
        arena,
        window_table,
        entry_table,
        selected,
        cu_seqlens_q,
        seqused_k,
        window=window,
        window_rows_per_block=window_rows_per_block,
        window_offset=window_offset,
        window_format=window_format,
        scale=scale,
        window_scale_offset=window_scale_offset,
        ratio=ratio,
        entry_rows_per_block=entry_rows_per_block,
        entry_offset=entry_offset,
        entry_format=entry_format,
        entry_scale_offset=entry_scale_offset,
        sinks=sinks,
        cos=cos,
        sin=sin,
    )
    return result


def _sparse_attention(
    query: Tensor,
    arena: Tensor,
    window_table: Tensor,
    entry_table: Tensor | None,
    selected: Tensor | None,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    sinks: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    **_settings: object,
) -> tuple[Tensor, Tensor]:
    op = "sparse_attention"
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.int32, window_table=window_table, entry_table=entry_table, selected=selected)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check_beside(arena, op, ndim=1, dtype=torch.float32, sinks=sinks)
    check_beside(arena, op, ndim=2, dtype=torch.float32, cos=cos, sin=sin)
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


register_fake("hetkv::sparse_attention", _sparse_attention)
refuse_gradients("sparse_attention")
