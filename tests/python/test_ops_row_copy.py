"""scatter_rows and gather_rows against a byte-for-byte reference that computes every address by itself."""

import dataclasses
import math
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops

UNIT = 256
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
    ),
]


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


def overlapping(row_stride: int, layer_stride: int) -> Tensor:
    return torch.zeros(1024).as_strided((LAYERS, N, WIDTH), (layer_stride, row_stride, 1))


Change = Callable[[dict[str, Any]], dict[str, Any]]
REFUSALS: list[tuple[str, str, Change]] = [
    ("arena.ndim", r"2: expected 1", lambda a: {"arena": a["arena"].view(2, -1)}),
    ("PACKED.ndim", r"1: expected at least 2", lambda _: {"PACKED": torch.zeros(3)}),
    ("slots.ndim", r"2: expected 1", lambda a: {"slots": a["slots"][None]}),
    ("arena.dtype", r"Float: expected Byte", lambda a: {"arena": a["arena"].view(torch.float32)}),
    ("slots.dtype", r"Int: expected Long", lambda a: {"slots": a["slots"].int()}),
    ("arena.layout", r"strided: expected contiguous", lambda _: {"arena": aligned_empty(2 * ARENA_BYTES)[::2]}),
    ("arena.data_ptr\\(\\) modulo 16", r"1: expected 0", lambda _: {"arena": aligned_empty(ARENA_BYTES + 1)[1:]}),
    ("slots.layout", r"strided: expected contiguous", lambda _: {"slots": torch.zeros(6, dtype=torch.int64)[::2]}),
    ("PACKED.stride\\(2\\)", r"2: expected 1", lambda _: {"PACKED": torch.zeros(LAYERS, N, 2 * WIDTH)[:, :, ::2]}),
    ("slots.size\\(0\\)", r"2: expected 3, the size of PACKED", lambda a: {"slots": a["slots"][:2]}),
    ("PACKED", r"memory shared with arena", lambda a: {"PACKED": a["arena"][:192].view(torch.float32).view(LAYERS, N, WIDTH)}),
    ("rows_per_block", r"3: expected a power of two", lambda _: {"rows_per_block": 3}),
    ("rows_per_block", r"0: expected a power of two", lambda _: {"rows_per_block": 0}),
    ("rows_per_block", r"-4: expected a power of two", lambda _: {"rows_per_block": -4}),
    ("section_offset", r"-1: expected at least 0", lambda _: {"section_offset": -1}),
    ("layer_stride", r"-160: expected at least 0", lambda _: {"layer_stride": -160}),
    ("layer_begin", r"-1: expected at least 0", lambda _: {"layer_begin": -1}),
    ("layer_stride", r"143: expected at least section_offset", lambda _: {"layer_stride": 143}),
    ("layer_stride", r"160: expected at least section_offset", lambda _: {"rows_per_block": 1 << 62}),
    ("layer_begin", r"1: expected 2 layers of 4611686018427387904 bytes", lambda _: {"layer_stride": 1 << 62}),
    ("layer_begin", r"9223372036854775807: expected 2 layers", lambda _: {"layer_begin": 2**63 - 1}),
    ("layer_begin", r"8: expected 2 layers of 160 bytes that end inside the arena of 1536", lambda _: {"layer_begin": 8}),
    ("slots\\[0\\]", r"-1: expected block_offset", lambda _: {"slots": torch.tensor([-1, 9, 18])}),
    ("slots\\[2\\]", r"9223372036854775807: expected block_offset", lambda _: {"slots": torch.tensor([0, 9, 2**63 - 1])}),
    ("slots\\[1\\]", r"20: expected block_offset", lambda _: {"slots": torch.tensor([0, 20, 18])}),
]


@pytest.mark.parametrize("op", ["scatter_rows", "gather_rows"])
@pytest.mark.parametrize(("what", "why", "change"), REFUSALS, ids=[f"{w}={y.split(':')[0]}" for w, y, _ in REFUSALS])
def test_wrong_arguments_are_refused_by_name(op: str, what: str, why: str, change: Change) -> None:
    packed = "rows" if op == "scatter_rows" else "out"
    args = arguments(op)
    call(op, args)
    args |= {(packed if name == "PACKED" else name): value for name, value in change(args).items()}
    before = {name: value.clone() for name, value in args.items() if isinstance(value, Tensor)}
    with pytest.raises(ValueError, match=rf"^{op}: {what} = {why}".replace("PACKED", packed)):
        call(op, args)
    for name, value in before.items():  # nothing was written, also where only the last slot was bad
        assert torch.equal(bits(args[name]), bits(value))


def test_the_last_row_of_the_arena_is_good_and_the_next_is_not() -> None:
    """Rows end at byte 1536 exactly: 3 * 256 + 16 + 2 * 160 + 3 * 32 + 32 = 1232 fits, a block three units on does not."""
    args = arguments("scatter_rows")
    last = next(s for s in reversed(range(4 * 6)) if GEOMETRY.address(s, LAYERS - 1, WIDTH * 4) + WIDTH * 4 <= ARENA_BYTES)
    call("scatter_rows", args | {"slots": torch.tensor([0, 1, last])})
    for bad in range(last + 1, 4 * 7):
        with pytest.raises(ValueError, match=rf"slots\[2\] = {bad}"):
            call("scatter_rows", args | {"slots": torch.tensor([0, 1, bad])})


@pytest.mark.parametrize(("row_stride", "layer_stride"), [(0, 24), (4, 24), (8, 8), (8, 16), (8, 0), (20, 4)])
def test_out_must_not_overlap_itself(row_stride: int, layer_stride: int) -> None:
    out = overlapping(row_stride, layer_stride)
    with pytest.raises(
        ValueError, match=rf"gather_rows: out.strides = \({layer_stride}, {row_stride}\): expected rows of 8 elements"
    ):
        call("gather_rows", arguments("gather_rows") | {"out": out})
    args = arguments("scatter_rows")  # a source may: broadcast rows are how a block is filled with one value
    call("scatter_rows", args | {"rows": out})


def test_broadcast_rows_fill_blocks() -> None:
    args = arguments("scatter_rows")
    call("scatter_rows", args | {"rows": torch.zeros(1, 1, WIDTH).expand(LAYERS, N, WIDTH)})
    expected = torch.ones(ARENA_BYTES, dtype=torch.uint8)
    reference_scatter(expected, torch.zeros(LAYERS, N, WIDTH), SLOTS, GEOMETRY)
    assert torch.equal(args["arena"], expected)


@pytest.mark.parametrize("op", ["scatter_rows", "gather_rows"])
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0), (0, 0)])
def test_nothing_to_copy(op: str, shape: tuple[int, ...]) -> None:
    args = arguments(op)
    packed = "rows" if op == "scatter_rows" else "out"
    call(op, args | {packed: torch.zeros(shape), "slots": torch.full((shape[1],), -1)})
    assert bool((args["arena"] == 1).all())
    empty = torch.empty(0, dtype=torch.uint8)
    call(op, args | {"arena": empty, packed: torch.zeros(shape), "slots": torch.full((shape[1],), -1)})
    with pytest.raises(ValueError, match="rows_per_block = 3"):
        call(op, args | {packed: torch.zeros(shape), "slots": torch.full((shape[1],), -1), "rows_per_block": 3})


@pytest.mark.parametrize("op", ["scatter_rows", "gather_rows"])
def test_gradients_are_refused_in_grad_mode_only(op: str) -> None:
    packed = "rows" if op == "scatter_rows" else "out"
    args = arguments(op)
    args[packed] = args[packed].clone().requires_grad_()
    with pytest.raises(ValueError, match=f"{op}: {packed}.requires_grad = True"):
        call(op, args)
    with torch.no_grad():
        call(op, args)
    with torch.inference_mode():
        call(op, arguments(op))


@pytest.mark.parametrize("op", ["scatter_rows", "gather_rows"])
def test_meta_tensors(op: str) -> None:
    packed = "rows" if op == "scatter_rows" else "out"
    args = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments(op).items()}
    call(op, args)
    with pytest.raises(ValueError, match=f"{op}: slots.dtype"):
        call(op, args | {"slots": args["slots"].int()})
    with pytest.raises(ValueError, match=f"{op}: arena.ndim = 2"):
        call(op, args | {"arena": args["arena"].view(2, -1)})
    with pytest.raises(RuntimeError, match=rf"{op}: slots.size\(0\) = 2: expected 3, the size of {packed}"):
        call(op, args | {"slots": args["slots"][:2]})
    with pytest.raises(ValueError, match=f"{op}: slots.device = cpu: expected meta"):
        call(op, args | {"slots": torch.tensor(SLOTS)})


@pytest.mark.parametrize("op", ["scatter_rows", "gather_rows"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    args = arguments(op)
    name = "rows" if op == "scatter_rows" else "out"
    width = WIDTH * 4 // dtype.itemsize
    padded = torch.zeros(LAYERS, N + 1, width + 2, dtype=dtype)[:, :N, :width]
    for packed in (args[name].view(dtype), padded):
        torch.library.opcheck(getattr(torch.ops.hetkv, op).default, tuple((args | {name: packed}).values()))


def step(arena: Tensor, rows: Tensor, slots: Tensor, geometry: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Reads between writes: any reordering or lost mutation shows."""
    first, second = torch.empty_like(rows), torch.empty_like(rows)
    hetkv.ops.scatter_rows(arena, rows, slots, **geometry)
    hetkv.ops.gather_rows(first, arena, slots, **geometry)
    hetkv.ops.scatter_rows(arena, rows + 1, slots.flip(0), **geometry)
    hetkv.ops.gather_rows(second, arena, slots, **geometry)
    return first * 2, second


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own imports
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_to_one_graph_without_copying_the_arena(backend: str) -> None:
    torch._dynamo.reset()
    # Only inductor undoes the copies of functionalization. Memory is mapped where touched: a copy of the arena shows in the peak.
    size = 1 << 31 if backend == "inductor" else 1 << 16
    arena = aligned_empty(size)
    arena[: 6 * UNIT] = 1
    address = arena.data_ptr()
    rows, slots = arguments("scatter_rows")["rows"], torch.tensor(SLOTS)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        first, second = compiled(arena, rows, slots, GEOMETRY.kwargs())
    peak_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert torch.equal(first, rows * 2)
    assert torch.equal(second, rows.flip(1) + 1)
    assert arena.data_ptr() == address
    expected = torch.ones(6 * UNIT, dtype=torch.uint8)
    reference_scatter(expected, rows.flip(1) + 1, SLOTS, GEOMETRY)
    assert torch.equal(arena[: 6 * UNIT], expected)
    if backend == "inductor":
        assert (peak_after - peak_before) * 1024 < size // 2
        return  # the rest would only wait for the C++ compiler
    for n in (1, 2):  # other lengths, through recompilation or symbolic sizes
        more = random_rows((LAYERS, n, WIDTH), torch.int64, n).float()
        with torch.no_grad():
            first, second = compiled(arena, more, slots[:n], GEOMETRY.kwargs())
        assert torch.equal(first, more * 2)
        assert torch.equal(second, more.flip(1) + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_skips_bad_slots_and_can_be_captured() -> None:
    args = arguments("scatter_rows", "cuda")
    slots = args["slots"]
    slots.copy_(torch.tensor([0, -1, 2**63 - 1]))
    call("scatter_rows", args)
    expected = torch.ones(ARENA_BYTES, dtype=torch.uint8)
    reference_scatter(expected, args["rows"][:, :1], [0], GEOMETRY)
    assert torch.equal(args["arena"].cpu(), expected)

    slots.copy_(torch.tensor(SLOTS))
    out = torch.zeros_like(args["rows"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call("scatter_rows", args)
        hetkv.ops.gather_rows(out, args["arena"], slots, **GEOMETRY.kwargs())
    slots.copy_(torch.tensor(SLOTS[::-1]))
    args["rows"].add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, args["rows"])
    reference_scatter(expected, args["rows"], SLOTS[::-1], GEOMETRY)
    assert torch.equal(args["arena"].cpu(), expected)
