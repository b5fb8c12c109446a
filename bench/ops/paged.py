"""Blocks full of random rows, for cases."""

from __future__ import annotations

import torch
from torch import Tensor

import hetkv.ops

UNIT = 256


class Pages:
    """Rows of `heads` vectors of `width` values in shuffled blocks of one arena; keys and, `copies` 2, values behind them."""

    def __init__(
        self, tokens: int, width: int, *, heads: int = 1, entry_format: str, rows_per_block: int = 64, copies: int = 1
    ) -> None:
        packed = {"fp8_packed": width + 64, "fp8_index": width}.get(entry_format)
        scales = {"fp8_packed": 8, "fp8_index": 4}.get(entry_format, 0)
        row_bytes = heads * (packed or width * {"float32": 4}.get(entry_format, 2))
        self.row_bytes, self.rows_per_block, self.entry_format = row_bytes + scales, rows_per_block, entry_format
        section = rows_per_block * row_bytes
        self.offsets = [copy * section for copy in range(copies)]
        self.scale_offset = copies * section
        units = -(-(copies * section + rows_per_block * scales) // UNIT)
        blocks = -(-tokens // rows_per_block)
        self.arena = torch.zeros(blocks * units * UNIT, dtype=torch.uint8)
        self.table = (torch.randperm(blocks) * units).int()[None]
        slots = (self.table[0].long()[:, None] * rows_per_block + torch.arange(rows_per_block)).flatten()[:tokens]
        self.dense = [torch.randn(tokens, heads, width) for _ in range(copies)]
        for offset, rows in zip(self.offsets, self.dense, strict=True):
            hetkv.ops.write_rows(
                self.arena,
                rows,
                slots,
                rows_per_block=rows_per_block,
                section_offset=offset,
                entry_format=entry_format,
                scale_offset=self.scale_offset,
            )


def lengths(*values: int) -> Tensor:
    """int32 tensor."""
    return torch.tensor(values, dtype=torch.int32)
