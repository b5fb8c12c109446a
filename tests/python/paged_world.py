"""An arena with the blocks of some sequences, made for tests of ops: everything that nobody wrote is NaN.

Blocks lie in a random order with gaps, each with several sections, so a wrong offset reads NaN or another section's values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference import formats

UNIT = 256
NAN_BYTE = 0xFF  # NaN in every float format


@dataclass(frozen=True)
class Section:
    """Rows of `heads` vectors of `width` values in blocks of `rows_per_block` rows."""

    entry_format: str
    width: int
    rows_per_block: int
    offset: int
    scale_offset: int = 0
    heads: int = 1

    @property
    def row_bytes(self) -> int:
        return self.heads * formats.data_bytes(self.entry_format, self.width)

    @property
    def end(self) -> int:
        scales = formats.scale_bytes(self.entry_format, self.width) * self.rows_per_block
        return max(self.offset + self.row_bytes * self.rows_per_block, self.scale_offset + scales)


def section(entry_format: str, width: int, rows_per_block: int, *, offset: int = 32, heads: int = 1) -> Section:
    """A section at `offset`, its scales behind its rows."""
    plain = Section(entry_format, width, rows_per_block, offset, 0, heads)
    return Section(entry_format, width, rows_per_block, offset, -(-plain.end // 16) * 16, heads)


class World:
    """One arena. `table` gives block tables of fresh blocks; `put` and `get` go by plain bytes."""

    def __init__(self, seed: int, blocks: int, block_bytes: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.units = -(-block_bytes // UNIT) + 1
        size = (blocks * self.units + 4) * UNIT
        raw = torch.full((size + 16,), NAN_BYTE, dtype=torch.uint8)
        self.arena = raw.narrow(0, -raw.data_ptr() % 16, size)
        self._free = (torch.randperm(blocks, generator=self.random) * self.units + 3).tolist()

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def table(self, rows: list[int], rows_per_block: int, columns: int | None = None) -> Tensor:
        """int32 [sequences, columns] for so many rows each; unused columns name no block of the arena."""
        needed = [-(-count // rows_per_block) for count in rows]
        table = torch.full((len(rows), columns or max([1, *needed])), 2**31 - 1, dtype=torch.int32)
        for sequence, count in enumerate(needed):
            for column in range(count):
                table[sequence, column] = self._free.pop()
        return table

    def slots(self, table_row: Tensor, rows: range | list[int], rows_per_block: int) -> Tensor:
        return torch.tensor(
            [int(table_row[r // rows_per_block]) * rows_per_block + r % rows_per_block for r in rows], dtype=torch.int64
        )

    def put(self, where: Section, table_row: Tensor, rows: Tensor, first: int = 0) -> Tensor:
        """Stores float32 rows ``[n, heads * width]`` from row `first` on; returns the values that they now mean, float64."""
        if len(rows) == 0:
            return rows.double()
        data, scales = formats.encode(rows.reshape(-1, where.width), where.entry_format)
        values = formats.decode(data, scales, where.entry_format).reshape(len(rows), -1)
        data = data.reshape(len(rows), -1)
        for i in range(len(rows)):
            start, scale_start = self._address(where, table_row, first + i)
            self.arena[start : start + where.row_bytes] = data[i]
            if scales.shape[1]:
                self.arena[scale_start : scale_start + scales.shape[1]] = scales[i]
        return values

    def get(self, where: Section, table_row: Tensor, row: int) -> tuple[Tensor, Tensor]:
        """The bytes of one stored row and of its scales."""
        start, scale_start = self._address(where, table_row, row)
        scales = formats.scale_bytes(where.entry_format, where.width)
        return self.arena[start : start + where.row_bytes].clone(), self.arena[scale_start : scale_start + scales].clone()

    def values(self, where: Section, table_row: Tensor, row: int) -> Tensor:
        """The values of one stored row, float64 [heads * width]."""
        data, scales = self.get(where, table_row, row)
        one = formats.data_bytes(where.entry_format, where.width)
        return torch.cat([formats.decode(part[None], scales[None], where.entry_format)[0] for part in data.split(one)])

    def _address(self, where: Section, table_row: Tensor, row: int) -> tuple[int, int]:
        block = int(table_row[row // where.rows_per_block]) * UNIT
        inside = row % where.rows_per_block
        scales = formats.scale_bytes(where.entry_format, where.width)
        return block + where.offset + inside * where.row_bytes, block + where.scale_offset + inside * scales


def sums(lengths: list[int]) -> Tensor:
    """cu_seqlens_q of so many tokens per sequence."""
    return torch.tensor([0, *lengths]).cumsum(0).int()
