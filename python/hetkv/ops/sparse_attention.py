"""Sparse-routed attention of DeepSeek-V4 and V3.2: a window of raw rows and selected entries in one softmax.

A key's leading values are its value."""

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
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of a ragged batch over the rows of the last ``window`` tokens and over entries. Both must be written first.

    The token at position p sees window rows ``[max(0, p - window + 1), p]`` and the entries of its row of ``selected``, or,
    without it, all of ``[0, (p + 1) // ratio)``. Keys are whole rows, values their first ``value_dim`` values. A sink is one
    more score of a head without a value. The last values of the output are rotated by the inverse of ``cos, sin``. Accumulates in
    float32. On the CPU a token's result has the same bits for every batch, chunking and number of threads.

    DeepSeek-V3.2 (absorbed): ``window=0``, ``ratio=1``, ``value_dim=512``; the entries are the tokens' rows of 512 latent and 64
    rotated values, ``selected`` comes from ``select_entries`` on the tokens' index keys, and the query is ``[tokens, heads,
    576]``: its part without rotation times the key half of the up-projection, then its rotated part.

    Args:
        query: ``[tokens, heads, dim]``, float32, float16 or bfloat16, contiguous, dim up to 576; rows and entries have one head.
        arena: ``uint8[bytes]``, only read.
        window_table, entry_table: int32 ``[batch, columns]``, as ``block_table`` of ``paged_attention``; entry_table None: no
            entries.
        selected: int32 ``[tokens, k]``, -1: none, as from ``select_entries``; taken in its order.
        cu_seqlens_q, seqused_k: as for ``paged_attention``.
        window: tokens, counts the query. 0: no window rows; ``window_table`` may then have no columns, entry_table must be given,
            and the section of the window is not looked at.
        ratio: tokens per entry.
        window_rows_per_block ... entry_scale_offset: of the two sections, as for ``write_rows``; any format.
        sinks: float32 ``[heads]``. cos, sin: float32 ``[tokens, rope / 2]``, of the tokens' positions; rope at most value_dim.
        value_dim: leading values of a row that are its value, at most dim; 0: all.

    Returns:
        out ``[tokens, heads, value_dim]`` of the query's dtype, and lse, float32 ``[tokens, heads]``, without the sink.
        Tokens of no sequence, and those that see no key: 0 and -inf.

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
        value_dim=value_dim,
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
    value_dim: int = 0,
    **_settings: object,
) -> tuple[Tensor, Tensor]:
    op = "sparse_attention"
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.int32, window_table=window_table, entry_table=entry_table, selected=selected)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check_beside(arena, op, ndim=1, dtype=torch.float32, sinks=sinks)
    check_beside(arena, op, ndim=2, dtype=torch.float32, cos=cos, sin=sin)
    return query.new_empty((*query.shape[:2], value_dim or query.shape[2])), query.new_empty(query.shape[:2], dtype=torch.float32)


register_fake("hetkv::sparse_attention", _sparse_attention)
refuse_gradients("sparse_attention")
