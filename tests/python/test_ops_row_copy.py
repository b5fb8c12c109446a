"""scatter_rows and gather_rows against a byte-for-byte reference that computes every address by itself."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from row_copy_reference import (
    DTYPES,
    UNIT,
    Geometry,
    aligned_empty,
    bits,
    random_bytes,
    random_rows,
    reference_gather,
    reference_scatter,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


@dataclasses.dataclass(frozen=True)
class Case:
    geometry: Geometry
    dtype: torch.dtype
    shape: tuple[int, ...]  # [layers, n, *row]
    slots: list[int]  # distinct
    gather_slots: list[int]  # as many, some twice
    arena_bytes: int
    row_gap: int  # elements between rows
    layer_gap: int  # elements between layers
    layers_inner: bool  # rows are the outer dimension in memory
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    row_shape = draw(st.sampled_from([(), (1,), (3,), (8,), (2, 8), (5, 1, 3), (64,), (96,)]))
    row_bytes = math.prod(row_shape) * dtype.itemsize
    rows_per_block = 1 << draw(st.integers(0, 5))
    section_offset = draw(st.integers(0, 4)) * draw(st.sampled_from([1, 16]))
    layer_stride = section_offset + rows_per_block * row_bytes + draw(st.sampled_from([0, 7, 16]))
    layers, skipped, trailing = draw(st.integers(1, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 1))
    block_units = -(-(skipped + layers + trailing) * layer_stride // UNIT)
    blocks = draw(st.integers(1, 5))
    every_slot = [b * block_units * rows_per_block + r for b in range(blocks) for r in range(rows_per_block)]
    slots = draw(st.one_of(st.just(every_slot), st.lists(st.sampled_from(every_slot), unique=True, min_size=1)))
    gather_slots = draw(st.lists(st.sampled_from(slots), min_size=len(slots), max_size=len(slots)))
    return Case(
        geometry=Geometry(rows_per_block, section_offset, layer_stride, skipped),
        dtype=dtype,
        shape=(layers, len(slots), *row_shape),
        slots=slots,
        gather_slots=gather_slots,
        arena_bytes=blocks * block_units * UNIT,
        row_gap=draw(st.integers(0, 3)),
        layer_gap=draw(st.integers(0, 3)),
        layers_inner=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    )


def strided(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """A tensor of the case's shape and strides, and the random bytes that it views."""
    layers, n = case.shape[:2]
    row = math.prod(case.shape[2:])
    if case.layers_inner:
        layer_stride = row + case.row_gap
        row_stride = layers * layer_stride + case.layer_gap
        size = n * row_stride
    else:
        row_stride = row + case.row_gap
        layer_stride = n * row_stride + case.layer_gap
        size = layers * layer_stride
    storage = random_bytes(size * case.dtype.itemsize, case.seed + 1).view(case.dtype).to(device)
    inner = [math.prod(case.shape[d + 1 :]) for d in range(2, len(case.shape))]
    return storage.as_strided(case.shape, (layer_stride, row_stride, *inner)), storage


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_equals_the_reference_and_touches_nothing_else(device: str, case: Case) -> None:
    before = random_bytes(case.arena_bytes, case.seed)
    arena = aligned_empty(case.arena_bytes, device)
    arena.copy_(before)
    rows, _ = strided(case, device)

    hetkv.ops.scatter_rows(arena, rows, torch.tensor(case.slots, device=device), **case.geometry.kwargs())
    expected = before.clone()
    reference_scatter(expected, rows, case.slots, case.geometry)
    assert torch.equal(arena.cpu(), expected)

    back = torch.zeros(case.shape, dtype=case.dtype, device=device)
    hetkv.ops.gather_rows(back, arena, torch.tensor(case.slots, device=device), **case.geometry.kwargs())
    assert torch.equal(bits(back), bits(rows))

    out, storage = strided(case, device)
    untouched = torch.ones_like(storage, dtype=torch.bool).as_strided(out.shape, out.stride())
    untouched.fill_(False)
    gaps, canary = untouched._base, storage.clone()
    assert gaps is not None
    hetkv.ops.gather_rows(out, arena, torch.tensor(case.gather_slots, device=device), **case.geometry.kwargs())
    assert torch.equal(bits(out), bits(reference_gather(expected, case.shape, case.dtype, case.gather_slots, case.geometry)))
    assert torch.equal(bits(storage[gaps]), bits(canary[gaps]))
    assert torch.equal(arena.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_large_copy_runs_in_parallel_ranges(device: str) -> None:
    """32 MiB, over every thread: ranges begin and end inside blocks and layers."""
    layers, n, width, rows_per_block = 31, 1031, 256, 64
    geometry = Geometry(rows_per_block, 0, rows_per_block * width * 4, 0)
    block_units = layers * geometry.layer_stride // UNIT
    blocks = -(-n // rows_per_block)
    arena = aligned_empty(blocks * block_units * UNIT, device)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    slots = (order[:, None] * block_units * rows_per_block + torch.arange(rows_per_block)).flatten()[:n].to(device)
    rows = random_rows((layers, n, width), torch.float32, 3).to(device)
    hetkv.ops.scatter_rows(arena, rows, slots, **geometry.kwargs())
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.zeros_like(rows)
    hetkv.ops.gather_rows(out, arena, slots[shuffled], **geometry.kwargs())
    assert torch.equal(bits(out), bits(rows[:, shuffled]))
    by_address = (
        arena.view(blocks, layers, rows_per_block, width * 4)[order.to(device)].transpose(0, 1).reshape(layers, -1, width * 4)
    )
    assert torch.equal(by_address[:, :n].cpu(), bits(rows).view(layers, n, width * 4))


def test_addresses_beyond_32_bits() -> None:
    """Offsets above 2^23 are bytes above 2^31, and slots above 2^32 wrap in 32 bits. Memory is mapped only where touched."""
    rows_per_block = 1024
    geometry = Geometry(rows_per_block, 0, 16 * rows_per_block, 1)
    size = 5 << 29  # 2.5 GiB
    arena = aligned_empty(size)
    blocks = [(1 << 23) + 5, (size - 3 * geometry.layer_stride) // UNIT]
    slots = [blocks[0] * rows_per_block + 3, blocks[1] * rows_per_block + rows_per_block - 1]
    assert max(slots) > 1 << 32
    addresses = [geometry.address(slot, layer, 16) for slot in slots for layer in range(2)]
    assert min(addresses) > 1 << 31
    assert max(addresses) + 16 == size  # the very last row
    aliases = [a % (1 << 31) for a in addresses]
    for address in aliases:
        arena[address : address + 16] = 77
    rows = random_rows((2, 2, 4), torch.float32, 5)
    hetkv.ops.scatter_rows(arena, rows, torch.tensor(slots), **geometry.kwargs())
    out = torch.zeros_like(rows)
    hetkv.ops.gather_rows(out, arena, torch.tensor(slots), **geometry.kwargs())
    assert torch.equal(bits(out), bits(rows))
    assert torch.equal(arena[addresses[0] : addresses[0] + 16], bits(rows)[0, 0])
    assert all(bool((arena[a : a + 16] == 77).all()) for a in aliases)
    with pytest.raises(ValueError, match=rf"scatter_rows: slots\[1\] = {slots[1] + rows_per_block}"):
        hetkv.ops.scatter_rows(arena, rows, torch.tensor([slots[0], slots[1] + rows_per_block]), **geometry.kwargs())
