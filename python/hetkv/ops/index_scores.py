"""The index of sparse-routed attention: scores of compressed entries, and the best of them."""

import torch
from torch import Tensor

from ._autograd import refuse_gradients
from ._fake import check, check_arena, check_beside, register_fake

__all__ = ["index_scores", "select_entries", "top_k"]


def index_scores(
    query: Tensor,
    weights: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    ratio: int,
    rows_per_block: int,
    section_offset: int,
    entry_format: str,
    scale_offset: int = 0,
) -> Tensor:
    """Scores of all entries that each token sees: ``sum over heads of weights * relu(query . key)``, in float32.

    The token at position p sees entries ``[0, (p + 1) // ratio)``; the others get -inf. A score has the same bits wherever its
    key stands and whatever else is scored.

    Args:
        query: ``[tokens, heads, dim]``, float32, float16 or bfloat16, contiguous; up to 128 heads of up to 512 values.
        weights: float32 ``[tokens, heads]``; constant factors belong in here.
        arena, block_table, cu_seqlens_q, seqused_k: as for ``paged_attention``, of the keys' group.
        ratio: tokens per entry. rows_per_block: entries per block, a power of two.
        section_offset, entry_format, scale_offset: of the keys, as for ``write_rows``.

    Returns:
        float32 ``[tokens, columns * rows_per_block]``.

    Raises:
        ValueError: a wrong argument; on the CPU also a block outside the arena that a token would read.
    """
    scores: Tensor = torch.ops.hetkv.index_scores(
        query,
        weights,
        arena,
        block_table,
        cu_seqlens_q,
        seqused_k,
        ratio=ratio,
        rows_per_block=rows_per_block,
        section_offset=section_offset,
        entry_format=entry_format,
        scale_offset=scale_offset,
    )
    return scores


def top_k(scores: Tensor, counts: Tensor | None, k: int) -> Tensor:
    """The k best of every row: score descending, then index ascending. -0 equals +0, NaN is below -inf.

    Args:
        scores: float32 ``[rows, n]``, the last dimension contiguous.
        counts: int32 ``[rows]``: only the first ``counts[r]`` scores of row r count; None: all.
        k: at least 1, on CUDA at most 4096; may exceed n.

    Returns:
        int32 ``[rows, k]``, -1 behind the last.
    """
    indices: Tensor = torch.ops.hetkv.top_k(scores, counts, k)
    return indices


def select_entries(
    query: Tensor,
    weights: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    ratio: int,
    rows_per_block: int,
    section_offset: int,
    entry_format: str,
    k: int,
    scale_offset: int = 0,
) -> Tensor:
    """The k best entries of every token: ``top_k`` of ``index_scores``, without the whole matrix of scores.

    Returns int32 ``[tokens, k]``, -1 behind the last; all -1 for tokens of no sequence. Arguments and errors as ``index_scores``;
    k as of ``top_k``.
    """
    indices: Tensor = torch.ops.hetkv.select_entries(
        query,
        weights,
        arena,
        block_table,
        cu_seqlens_q,
        seqused_k,
        ratio=ratio,
        rows_per_block=rows_per_block,
        section_offset=section_offset,
        entry_format=entry_format,
        k=k,
        scale_offset=scale_offset,
    )
    return indices


def _check_index(
    op: str, query: Tensor, weights: Tensor, arena: Tensor, *, block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor
) -> None:
    check_arena(op, arena)
    check_beside(arena, op, ndim=3, query=query)
    check_beside(arena, op, ndim=2, dtype=torch.float32, weights=weights)
    check_beside(arena, op, ndim=2, dtype=torch.int32, block_table=block_table)
    check_beside(arena, op, ndim=1, dtype=torch.int32, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)


def _index_scores(
    query: Tensor,
    weights: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    rows_per_block: int,
    **_settings: object,
) -> Tensor:
    tables = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
    _check_index("index_scores", query, weights, arena, **tables)
    return query.new_empty((query.shape[0], block_table.shape[1] * rows_per_block), dtype=torch.float32)


def _select_entries(
    query: Tensor,
    weights: Tensor,
    arena: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    k: int,
    **_settings: object,
) -> Tensor:
    tables = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
    _check_index("select_entries", query, weights, arena, **tables)
    return query.new_empty((query.shape[0], k), dtype=torch.int32)


def _top_k(scores: Tensor, counts: Tensor | None, k: int) -> Tensor:  # noqa: ARG001
    check(scores.ndim == 2, "top_k", f"scores.ndim = {scores.ndim}: expected 2")
    check(scores.dtype == torch.float32, "top_k", f"scores.dtype = {scores.dtype}: expected torch.float32")
    return scores.new_empty((scores.shape[0], k), dtype=torch.int32)


register_fake("hetkv::index_scores", _index_scores)
register_fake("hetkv::select_entries", _select_entries)
register_fake("hetkv::top_k", _top_k)
for _op in ("index_scores", "select_entries", "top_k"):
    refuse_gradients(_op)
