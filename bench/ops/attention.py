"""Paged attention beside torch's scaled_dot_product_attention, sparse-routed attention beside eager code on dense rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

import hetkv.ops

from .paged import Pages, lengths
from .timing import Line, beside


def lines(repeats: int) -> Iterator[Line]:
    """Decoding with grouped heads, windowed and causal prefill, one token of DeepSeek-V4."""
    yield _grouped("GQA decode, 32k tokens, 32/8 heads of 128, bf16", 32768, 1, window=0, repeats=repeats)
    yield _grouped("windowed prefill 4k, W 128, 32/8 heads of 128, bf16", 4096, 4096, window=128, repeats=min(repeats, 3))
    yield _grouped("causal prefill 4k, 32/8 heads of 128, bf16", 4096, 4096, window=0, repeats=min(repeats, 3))
    yield _routed("V4 decode, 64 heads of 512, 128 + 512 packed FP8 rows", repeats)


def _grouped(case: str, tokens: int, queries: int, *, window: int, repeats: int) -> Line:
    heads, kv_heads, dim = 32, 8, 128
    pages = Pages(tokens, dim, heads=kv_heads, entry_format="bfloat16", copies=2)
    query = torch.randn(queries, heads, dim).bfloat16()
    cu, used = lengths(0, queries), lengths(tokens)
    keys, values = (rows.bfloat16().transpose(0, 1)[None].contiguous() for rows in pages.dense)
    dense_query = query.transpose(0, 1)[None].contiguous()
    mask = None
    if window:
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
        mask = (distance >= 0) & (distance < window)

    def ours() -> object:
        return hetkv.ops.paged_attention(
            query,
            pages.arena,
            pages.table,
            cu,
            used,
            num_kv_heads=kv_heads,
            rows_per_block=64,
            key_offset=pages.offsets[0],
            value_offset=pages.offsets[1],
            entry_format="bfloat16",
            scale=dim**-0.5,
            window=window,
        )

    def theirs() -> object:
        causal = mask is None and queries > 1
        return scaled_dot_product_attention(dense_query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)

    if queries == 1:
        amount, unit = tokens * kv_heads * dim * 2 * 2.0, "GB/s"
    else:
        seen = sum(min(t + 1, window or t + 1) for t in range(tokens))
        amount, unit = 4.0 * dim * heads * seen, "GFLOP/s"
    return beside(case, ours, "torch sdpa", theirs, amount=amount, unit=unit, device="cpu", repeats=repeats)


def _routed(case: str, repeats: int) -> Line:
    heads, dim, window, k, entries = 64, 512, 128, 512, 8192
    rows, pooled = Pages(window, dim, entry_format="fp8_packed"), Pages(entries, dim, entry_format="fp8_packed")
    arena = torch.cat([rows.arena, pooled.arena])
    pooled_table = pooled.table + rows.arena.numel() // 256
    query, selected = torch.randn(1, heads, dim).bfloat16(), torch.randperm(entries)[:k].int()[None]
    # A token at position 4 * entries - 1; its window's rows are the last of the table.
    position_rows = 4 * entries
    table = rows.table.repeat(1, position_rows // window)
    cu, used = lengths(0, 1), lengths(position_rows)
    dense = torch.cat([rows.dense[0][:, 0], pooled.dense[0][:, 0]]).bfloat16()

    def ours() -> object:
        return hetkv.ops.sparse_attention(
            query,
            arena,
            table,
            pooled_table,
            selected,
            cu,
            used,
            window=window,
            window_rows_per_block=64,
            window_offset=0,
            window_format="fp8_packed",
            window_scale_offset=rows.scale_offset,
            ratio=4,
            entry_rows_per_block=64,
            entry_offset=0,
            entry_format="fp8_packed",
            entry_scale_offset=pooled.scale_offset,
            scale=dim**-0.5,
        )

    def theirs() -> object:  # on bf16 rows that nobody has to unpack
        keys = torch.cat([dense[:window], dense[window + selected[0]]])
        weights = torch.softmax((query[0] @ keys.T).float() * dim**-0.5, dim=-1)
        return weights.bfloat16() @ keys

    amount = 4.0 * heads * dim * (window + k)
    return beside(case, ours, "torch eager, bf16 rows", theirs, amount=amount, unit="GFLOP/s", device="cpu", repeats=repeats)
