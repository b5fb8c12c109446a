"""What scatter_rows and gather_rows refuse, and how they behave inside torch: meta tensors, opcheck, compilation, CUDA graphs."""

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hetkv.ops
from row_copy_reference import (
    ARENA_BYTES,
    DTYPES,
    GEOMETRY,
    LAYERS,
    SLOTS,
    UNIT,
    WIDTH,
    N,
    aligned_empty,
    arguments,
    bits,
    call,
    random_rows,
    reference_scatter,
)


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
