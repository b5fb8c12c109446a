"""Copying rows, computed byte by byte from the addresses, and good arguments of both operations."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

UNIT = 256
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]


def aligned_empty(size: int, device: str = "cpu") -> Tensor:
    """uint8[size] at an address that is a multiple of 256, as hetkv.Cache makes it."""
    raw = torch.empty(size + UNIT, dtype=torch.uint8, device=device)
    return raw.narrow(0, -raw.data_ptr() % UNIT, size)


def random_bytes(size: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, NaNs among them: a copy must not care."""
    return random_bytes(math.prod(shape) * dtype.itemsize, seed).view(dtype).view(shape)


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(torch.uint8)


@dataclasses.dataclass(frozen=True)
class Geometry:
    rows_per_block: int
    section_offset: int
    layer_stride: int
    layer_begin: int

    def kwargs(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def address(self, slot: int, layer: int, row_bytes: int) -> int:
        block, row = divmod(slot, self.rows_per_block)
        return block * UNIT + self.section_offset + (self.layer_begin + layer) * self.layer_stride + row * row_bytes


def reference_scatter(arena: Tensor, rows: Tensor, slots: list[int], geometry: Geometry) -> None:
    layers, n = rows.shape[:2]
    row_bytes = math.prod(rows.shape[2:]) * rows.element_size()
    packed = bits(rows).reshape(layers, n, row_bytes)
    for layer in range(layers):
        for i, slot in enumerate(slots):
            at = geometry.address(slot, layer, row_bytes)
            arena[at : at + row_bytes] = packed[layer, i]


def reference_gather(arena: Tensor, shape: tuple[int, ...], dtype: torch.dtype, slots: list[int], geometry: Geometry) -> Tensor:
    row_bytes = math.prod(shape[2:]) * dtype.itemsize
    packed = torch.empty(shape[0], shape[1], row_bytes, dtype=torch.uint8)
    for layer in range(shape[0]):
        for i, slot in enumerate(slots):
            at = geometry.address(slot, layer, row_bytes)
            packed[layer, i] = arena[at : at + row_bytes]
    return packed.view(dtype).view(shape)


GEOMETRY = Geometry(rows_per_block=4, section_offset=16, layer_stride=160, layer_begin=1)
LAYERS, N, WIDTH = 2, 3, 8  # rows of 32 bytes; a block of 3 layers takes 480 bytes, 2 units
SLOTS = [0, 9, 18]
ARENA_BYTES = 6 * UNIT


def arguments(op: str, device: str = "cpu") -> dict[str, Any]:
    """Good arguments of either op, by name, in the order of the schema."""
    arena = aligned_empty(ARENA_BYTES, device).fill_(1)
    packed = torch.arange(LAYERS * N * WIDTH, dtype=torch.float32, device=device).view(LAYERS, N, WIDTH)
    tensors = {"arena": arena, "rows": packed} if op == "scatter_rows" else {"out": packed, "arena": arena}
    return {**tensors, "slots": torch.tensor(SLOTS, device=device), **GEOMETRY.kwargs()}


def call(op: str, args: dict[str, Any]) -> None:
    getattr(torch.ops.hetkv, op)(*args.values())
