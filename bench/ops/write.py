"""Writing rows: plain, and normed, rotated and quantised, beside torch's cast of the same rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import hetkv.ops

from .paged import Pages
from .timing import Line, beside


def lines(repeats: int) -> Iterator[Line]:
    """4,096 rows of 512 values."""
    rows, width = 4096, 512
    source = torch.randn(rows, width)
    cos, sin, norm = torch.ones(rows, 32), torch.zeros(rows, 32), torch.ones(width)
    for entry_format in ("bfloat16", "fp8_packed"):
        pages = Pages(rows, width, entry_format=entry_format)
        slots = (pages.table[0].long()[:, None] * 64 + torch.arange(64)).flatten()

        def ours(pages: Pages = pages, slots: torch.Tensor = slots) -> None:
            hetkv.ops.write_rows(
                pages.arena,
                source,
                slots,
                rows_per_block=64,
                section_offset=0,
                entry_format=pages.entry_format,
                scale_offset=pages.scale_offset,
                norm_weight=norm,
                cos=cos,
                sin=sin,
            )

        yield beside(
            f"write 4,096 rows of 512: norm, rope, {entry_format}", ours, "torch's cast to bfloat16", source.bfloat16,
            amount=rows * (width * 4 + pages.row_bytes), unit="GB/s", device="cpu", repeats=repeats,
        )  # fmt: skip
