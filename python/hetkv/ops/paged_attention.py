"""Attention over keys and values in blocks: prefill and decoding, full or sliding window, in one op."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check_arena, check_beside, register_fake

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    num_kv_heads: int,
    rows_per_block: int,
    key_offset: int,
    value_offset: int,
    entry_format: str,
    scale: float,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch. The keys of a step must be written first.

    Query token i of sequence b has position ``p = seqused_k[b] - q_len + i`` and sees tokens ``[max(0, p - window + 1), p]``; its
    score is ``scale * q.k``, capped to ``softcap * tanh(score / softcap)`` if softcap is not 0. A sink is one more score of a
    head without a value. Accumulates in float32. A token's result has the same bits for every batch, chunking and number of
    threads;
    against exact arithmetic it is right up to float32 rounding, and the rounding of the formats.

    Args:
        query: ``[tokens, heads, head dim]``, float32, float16 or bfloat16, contiguous; head dim up to 512; at most 64 heads per
        KV
            head.
        arena: ``uint8[bytes]``, only read.
        block_table: int32 ``[batch, columns]``: row t of a sequence lies in block ``block_table[b, t // rows_per_block]``.
        Columns
            that no token of the step reaches may hold anything.
        cu_seqlens_q: int32 ``[batch + 1]``; tokens behind its last element belong to no sequence.
        seqused_k: int32 ``[batch]``: tokens of each sequence, this step's included; 0: padding.
        num_kv_heads: heads of a stored row. rows_per_block: a power of two.
        key_offset, value_offset: bytes from a block's start to row 0 of this layer's keys and values; equal: K = V.
        entry_format: float32, float16 or bfloat16.
        window: counts the query; 0: all. sinks: float32 ``[heads]``.

    Returns:
        out, as query, and lse, float32 ``[tokens, heads]``: log of the sum of e^score, without the sink. Tokens of no sequence: 0
        and -inf.

    Raises:
        ValueError: a wrong argument; on the CPU also a block outside the arena that a token would read.
    """
    result: tuple[Tensor, Tensor] = torch.ops.hetkv.paged_attention(
        query,
        arena,
        block_table,
        cu_seqlens_q,
        seqused_k,
        num_kv_heads=num_kv_heads,
        rows_per_block=rows_per_block,
        key_offset=key_offset,
        value_offset=value_offset,
        entry_format=entry_format,
        scale=scale,
        window=window,
        sinks=sinks,
        softcap=softcap,
    )
    return result


def _paged_attention(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    sinks: Tensor | None = None,
    **_settings: object,
) -> tuple[Tensor, Tensor]:
    op = "paged_attention"
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.int32, block_table=block_table)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check_beside(arena, op, ndim=1, dtype=torch.float32, sinks=sinks)
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


register_fake("hetkv::paged_attention", _paged_attention)
refuse_gradients("paged_attention")
