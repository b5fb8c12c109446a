"""Index scores beside eager code, top-k beside torch.topk and beside a stable sort, which alone has the fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import hetkv.ops

from .paged import Pages, lengths
from .timing import Line, beside


def lines(repeats: int) -> Iterator[Line]:
    """One token of 64 heads against 32k keys; the best 512 of 32k scores."""
    heads, dim, entries, k = 64, 128, 32768, 512
    pages = Pages(entries, dim, entry_format="fp8_index")
    query, weights = torch.randn(1, heads, dim), torch.randn(1, heads)
    keys = pages.dense[0][:, 0].contiguous()

    def scores() -> torch.Tensor:
        return hetkv.ops.index_scores(
            query,
            weights,
            pages.arena,
            pages.table,
            lengths(0, 1),
            lengths(entries),
            ratio=1,
            rows_per_block=64,
            section_offset=0,
            entry_format="fp8_index",
            scale_offset=pages.scale_offset,
        )

    def eager() -> torch.Tensor:  # on float32 keys that nobody has to unpack
        return (torch.relu(query[0] @ keys.T) * weights[0][:, None]).sum(dim=0)

    yield beside(
        "index scores, 64 heads of 128, 32k FP8 keys", scores, "torch eager, fp32 keys", eager,
        amount=2.0 * heads * dim * entries, unit="GFLOP/s", device="cpu", repeats=repeats,
    )  # fmt: skip
    row = torch.randn(1, entries)
    for name, theirs in (
        ("torch.topk (ties as they come)", lambda: torch.topk(row, k)),
        ("a stable sort", lambda: torch.sort(row, descending=True, stable=True)),
    ):
        yield beside(
            "top 512 of 32k scores", lambda: hetkv.ops.top_k(row, None, k), name, theirs,
            amount=4.0 * entries, unit="GB/s", device="cpu", repeats=repeats,
        )  # fmt: skip
