"""Block-routed attention (MiniMax-M3): scores of runs of tokens, and attention over the runs that a KV head chose."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_arena, check_beside, register_fake

__all__ = ["block_scores", "block_sparse_attention"]


def block_scores(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    rows_per_block: int,
    section_offset: int,
    entry_format: str,
    scale_offset: int = 0,
    routed_tokens: int = 128,
    local_blocks: int = 1,
) -> Tensor:
    """Scores of routed blocks: the largest ``query . key`` over those keys of a block that the token sees, in float32.

    Routed block j is tokens ``[j * routed_tokens, (j + 1) * routed_tokens)``. The token at position p sees keys ``[0, p]``. Its
    own block and the ``local_blocks - 1`` before it get +inf, blocks behind it -inf; a NaN of a key that it sees shows. A score
    has the same bits wherever its block stands and whatever else is scored.

    The choice of every head is ``top_k(scores.flatten(0, 1), None, k)``: equal scores go to the lower block, and blocks that it
    may name with a score of -inf are none to ``block_sparse_attention``.

    Args:
        query: ``[tokens, heads, dim]``, float32, float16 or bfloat16, contiguous; up to 64 heads of up to 512 values. One head
            per KV head of the attention; all share one key.
        arena, block_table, cu_seqlens_q, seqused_k: as for ``paged_attention``, of the index keys' group.
        rows_per_block: keys per block of the arena, a power of two.
        section_offset, entry_format, scale_offset: of the keys, as for ``write_rows``.
        routed_tokens: tokens of a routed block, at least 1. local_blocks: forced ones, 0: none.

    Returns:
        float32 ``[tokens, heads, ceil(columns * rows_per_block / routed_tokens)]``; -inf for tokens of no sequence.

    Raises:
        ValueError: a wrong argument; on the CPU also a block outside the arena that a token sees.
    """
    scores: Tensor = torch.ops.hetkv.block_scores(
        query,
        arena,
        block_table,
        cu_seqlens_q,
        seqused_k,
        rows_per_block=rows_per_block,
        section_offset=section_offset,
        entry_format=entry_format,
        scale_offset=scale_offset,
        routed_tokens=routed_tokens,
        local_blocks=local_blocks,
    )
    return scores


def block_sparse_attention(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    selected_blocks: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    num_kv_heads: int,
    rows_per_block: int,
    key_offset: int,
    value_offset: int,
    entry_format: str,
    scale: float,
    routed_tokens: int = 128,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a ragged batch over chosen blocks of tokens. The keys of a step must be written first.

    The token at position p sees, in the heads of a KV head's group, those tokens of the blocks
    ``selected_blocks[token, kv head]`` that are at p or before. The order of the list does not matter, a block named twice counts
    once, and one that begins behind p counts as none. The score is ``scale * q.k``; a sink is one more score of a head without a
    value. Accumulates in float32. On the CPU, a token's result has the same bits for every batch, chunking and number of threads.

    Args:
        query: ``[tokens, heads, head dim]``, float32, float16 or bfloat16, contiguous; head dim up to 512; at most 64 heads per
            KV head.
        arena, block_table, cu_seqlens_q, seqused_k: as for ``paged_attention``.
        selected_blocks: int32 ``[tokens, num_kv_heads, k]``, contiguous, -1: none, as from ``top_k`` of ``block_scores``.
        num_kv_heads: heads of a stored row. rows_per_block: of the arena's blocks, a power of two.
        key_offset, value_offset: bytes from a block's start to row 0 of this layer's keys and values; equal: K = V.
        entry_format: float32, float16 or bfloat16.
        routed_tokens: tokens of a routed block, at least 1; as for ``block_scores``.
        sinks: float32 ``[heads]``.

    Returns:
        out, as query, and lse, float32 ``[tokens, heads]``: log of the sum of e^score, without the sink. Tokens of no sequence,
        and those that see no key: 0 and -inf.

    Raises:
        ValueError: a wrong argument; on the CPU also a selected block below -1, or one that leads outside the arena.
    """
    result: tuple[Tensor, Tensor] = torch.ops.hetkv.block_sparse_attention(
        query,
        arena,
        block_table,
        selected_blocks,
        cu_seqlens_q,
        seqused_k,
        num_kv_heads=num_kv_heads,
        rows_per_block=rows_per_block,
        key_offset=key_offset,
        value_offset=value_offset,
        entry_format=entry_format,
        scale=scale,
        routed_tokens=routed_tokens,
        sinks=sinks,
    )
    return result


def _block_scores(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    rows_per_block: int,
    routed_tokens: int = 128,
    **_settings: object,
) -> Tensor:
    op = "block_scores"
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.int32, block_table=block_table)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check(routed_tokens >= 1, op, f"routed_tokens = {routed_tokens}: expected 1 to {2**31 - 1}")
    blocks = (block_table.shape[1] * rows_per_block + routed_tokens - 1) // routed_tokens
    return query.new_empty((*query.shape[:2], blocks), dtype=torch.float32)


def _block_sparse_attention(
    query: Tensor,
    arena: Tensor,
    block_table: Tensor,
    selected_blocks: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    sinks: Tensor | None = None,
    **_settings: object,
) -> tuple[Tensor, Tensor]:
    op = "block_sparse_attention"
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.int32, block_table=block_table)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    check_beside(arena, op, ndim=3, dtype=torch.int32, selected_blocks=selected_blocks)
    check_beside(arena, op, ndim=1, dtype=torch.float32, sinks=sinks)
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)


register_fake("hetkv::block_scores", _block_scores)
register_fake("hetkv::block_sparse_attention", _block_sparse_attention)
for _op in ("block_scores", "block_sparse_attention"):
    refuse_gradients(_op)
