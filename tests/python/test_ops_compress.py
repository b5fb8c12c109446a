"""compress against float64: CSA, HCA and index shapes; any chunking of a prompt gives the same bits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from paged_world import UNIT, Section, World, section, sums
from reference import formats
from reference.compress import compressed_entries, ring_after


@dataclass
class Compressor:
    """Weights of one compressor, and where its entries and rings lie."""

    ratio: int
    overlap: bool
    width: int
    dtype: torch.dtype = torch.float32
    entry_format: str = "float32"
    rope: int = 8
    rows_per_block: int = 4
    seed: int = 0
    bias: Tensor = field(init=False)
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.bias = torch.randn(self.ratio, self.raw_width, generator=generator)
        self.norm = 1 + 0.1 * torch.randn(self.width, generator=generator)

    @property
    def raw_width(self) -> int:
        return self.width * (2 if self.overlap else 1)

    @property
    def ring_rows(self) -> int:
        rows = self.ratio * (2 if self.overlap else 1)
        return 1 << (rows - 1).bit_length()

    @property
    def ring_bytes(self) -> int:
        return 2 * self.ring_rows * self.raw_width * self.dtype.itemsize

    def entries(self) -> Section:
        return section(self.entry_format, self.width, self.rows_per_block)

    def ring(self, name: str) -> Section:
        half = self.ring_bytes // 2
        return Section(str(self.dtype).removeprefix("torch."), self.raw_width, self.ring_rows, 0 if name == "kv" else half)

    def rotation(self, position: Tensor) -> tuple[Tensor, Tensor]:
        angle = position[:, None] * torch.arange(1, self.rope // 2 + 1) * 0.37
        return angle.cos(), angle.sin()

    def expected(self, kv: Tensor, gate: Tensor) -> Tensor:
        cos, sin = self.rotation(torch.arange(len(kv) // self.ratio) * float(self.ratio))
        return compressed_entries(kv, gate, self.bias, self.norm, cos=cos, sin=sin, ratio=self.ratio, overlap=self.overlap)


class Sequences:
    """Raw rows of some sequences in one world, fed to the op step by step."""

    def __init__(self, compressor: Compressor, lengths: list[int], seed: int = 1) -> None:
        self.of = compressor
        where = compressor.entries()
        blocks = sum(-(-n // compressor.ratio) // compressor.rows_per_block + 2 for n in lengths) + len(lengths)
        self.world = World(seed, blocks, max(where.end, compressor.ring_bytes))
        self.kv = [self.world.randn(n, compressor.raw_width).to(compressor.dtype) for n in lengths]
        self.gate = [self.world.randn(n, compressor.raw_width).to(compressor.dtype) for n in lengths]
        self.tables = self.world.table([n // compressor.ratio + 1 for n in lengths], compressor.rows_per_block)
        self.rings = self.world.table([1] * len(lengths), 1)
        self.done = [0] * len(lengths)

    def step(self, counts: list[int], padding: int = 0) -> None:
        of = self.of
        kv, gate, positions, slots, used = [], [], [], [], []
        for b, count in enumerate(counts):
            begin, end = self.done[b], self.done[b] + count
            kv.append(self.kv[b][begin:end])
            gate.append(self.gate[b][begin:end])
            positions.append(torch.arange(begin, end))
            entries = [p // of.ratio for p in range(begin, end)]
            closes = [(p + 1) % of.ratio == 0 for p in range(begin, end)]
            real = self.world.slots(self.tables[b], entries, of.rows_per_block)
            slots.append(torch.where(torch.tensor(closes, dtype=torch.bool), real, 2**50))  # never looked at elsewhere
            used.append(end if count else 0)
            self.done[b] = end
        position = torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)])
        cos, sin = of.rotation((position + 1 - of.ratio).clamp_min(0).float())
        where = of.entries()
        pad = torch.full((padding, of.raw_width), float("nan"), dtype=of.dtype)
        hetkv.ops.compress(
            self.world.arena,
            torch.cat([*kv, pad]),
            torch.cat([*gate, pad]),
            of.bias,
            of.norm,
            cos,
            sin,
            sums(counts),
            torch.tensor(used, dtype=torch.int32),
            self.rings,
            torch.cat([*slots, torch.full((padding,), 2**50)]),
            ratio=of.ratio,
            overlap=of.overlap,
            ring_rows=of.ring_rows,
            ring_kv_offset=0,
            ring_gate_offset=of.ring_bytes // 2,
            rows_per_block=of.rows_per_block,
            section_offset=where.offset,
            entry_format=where.entry_format,
            scale_offset=where.scale_offset,
        )

    def stored(self, b: int) -> list[bytes]:
        count = self.done[b] // self.of.ratio
        return [bytes(torch.cat(self.world.get(self.of.entries(), self.tables[b], e)).tolist()) for e in range(count)]

    def check(self) -> None:
        where = self.of.entries()
        for b, done in enumerate(self.done):
            expected = self.of.expected(self.kv[b][:done], self.gate[b][:done])
            bound = {
                "float32": 1e-5,
                "float16": 2e-3,
                "bfloat16": 1e-2,
                "fp8_packed": 0.07,
                "fp8_index": 0.07,
                "mxfp4_index": 0.3,
            }
            for entry in range(len(expected)):
                got = self.world.values(where, self.tables[b], entry)
                largest = float(expected[entry].abs().max())
                torch.testing.assert_close(got, expected[entry], rtol=0, atol=bound[where.entry_format] * max(1.0, largest))
            for name, rows in (("kv", self.kv[b]), ("gate", self.gate[b])):
                ring = ring_after(
                    rows[:done], self.of.ring_rows, torch.full((self.of.ring_rows, self.of.raw_width), float("nan"))
                )
                got = torch.stack([self.world.values(self.of.ring(name), self.rings[b], r) for r in range(self.of.ring_rows)])
                assert torch.equal(got.nan_to_num(7.0), ring.double().nan_to_num(7.0))


CSA = {"ratio": 4, "overlap": True}
HCA = {"ratio": 128, "overlap": False}


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(4, True), (4, False), (1, False), (1, True), (3, True), (16, False), (128, False)]),
    st.sampled_from([8, 24, 64]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.lists(st.lists(st.integers(0, 70), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 2**16),
)
def test_ragged_steps_give_the_entries_and_rings_of_the_reference(
    shape: tuple[int, bool], width: int, dtype: torch.dtype, steps: list[list[int]], seed: int
) -> None:
    batch = max(map(len, steps))
    counts = [step + [0] * (batch - len(step)) for step in steps]
    sequences = Sequences(
        Compressor(*shape, width, dtype, seed=seed), [sum(column) for column in zip(*counts, strict=True)], seed
    )
    for number, step in enumerate(counts):
        sequences.step(step, padding=number)
    sequences.check()


@pytest.mark.parametrize("entry_format", [*formats.DTYPES, *formats.PACKED])
def test_entries_in_every_format(entry_format: str) -> None:
    compressor = Compressor(4, True, 128, entry_format=entry_format)
    sequences = Sequences(compressor, [37, 20])
    sequences.step([18, 20])
    sequences.step([19, 0])
    sequences.check()


@pytest.mark.parametrize("shape", [CSA, HCA], ids=["CSA", "HCA"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_chunking_gives_the_same_bits(shape: dict[str, Any], dtype: torch.dtype) -> None:
    """All two-way splits of a 300-token prompt, and 200 random chunkings."""
    compressor = Compressor(**shape, width=24, dtype=dtype)
    whole = Sequences(compressor, [300])
    whole.step([300])
    whole.check()
    expected, arena = whole.stored(0), whole.world.arena
    rows = random.Random(0)
    cuts = [[cut] for cut in range(1, 300)]
    cuts += [sorted(rows.sample(range(1, 300), rows.randint(2, 40))) for _ in range(200)]
    for cut in cuts:
        again = Sequences(compressor, [300])
        for begin, end in zip([0, *cut], [*cut, 300], strict=True):
            again.step([end - begin])
        assert again.stored(0) == expected
        assert torch.equal(again.world.arena, arena)


def test_an_entry_does_not_depend_on_its_neighbours_in_the_batch() -> None:
    compressor = Compressor(**CSA, width=64)
    alone = Sequences(compressor, [50])
    alone.step([50])
    beside = Sequences(compressor, [50, 33, 129])
    beside.kv[0], beside.gate[0] = alone.kv[0], alone.gate[0]
    beside.step([20, 33, 100])
    beside.step([30, 0, 29])
    assert beside.stored(0) == alone.stored(0)


def test_threads_do_not_change_the_bits() -> None:
    compressor = Compressor(**HCA, width=512)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        sequences = Sequences(compressor, [1024])
        sequences.step([1024])
        results.append(sequences.stored(0))
    torch.set_num_threads(before)
    assert results[0] == results[1]


def test_an_entry_with_slot_minus_one_is_not_stored() -> None:
    sequences = Sequences(Compressor(**CSA, width=8), [8])
    sequences.world.slots = lambda _row, rows, _per_block: torch.full((len(rows),), -1)  # type: ignore[assignment]
    sequences.step([8])
    assert all(set(entry) == {0xFF} for entry in sequences.stored(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(5, 12)}, r"kv.size\(1\)|gate.size"),
        ({"gate": torch.zeros(5, 16, dtype=torch.float16)}, "gate.dtype"),
        ({"gate": torch.zeros(4, 16)}, r"gate.size\(0\)"),
        ({"position_bias": torch.zeros(3, 16)}, "position_bias"),
        ({"norm_weight": torch.zeros(7)}, "norm_weight"),
        ({"cos": torch.zeros(5, 5)}, "sin|cos"),
        ({"seqused_k": torch.tensor([4], dtype=torch.int32)}, r"seqused_k\[0\] = 4"),
        ({"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int32)}, r"cu_seqlens_q\[1\] = 9"),
        ({"ring_table": torch.tensor([[2**31 - 1]], dtype=torch.int32)}, r"ring_table\[0\]"),
        ({"slots": torch.full((5,), 2**50)}, r"slots\[3\]"),
        ({"ring_rows": 4}, "ring_rows = 4"),
        ({"ring_rows": 12}, "ring_rows = 12"),
        ({"ring_gate_offset": 8}, "ring_gate_offset = 8"),
        ({"ring_rows": 2**58}, "ring_kv_offset = 0: expected a ring of"),  # its bytes would wrap to 0
        ({"ring_kv_offset": 2**63 - 16}, "ring_kv_offset = 9223372036854775792"),
        ({"ratio": 0}, "ratio = 0"),
        ({"kv": torch.zeros(5, 16, requires_grad=True)}, "kv.requires_grad"),
    ],
)
def test_refusals_name_op_and_argument_and_write_nothing(change: dict[str, Any], message: str) -> None:
    arena = torch.full((4096,), 0xFF, dtype=torch.uint8)
    arguments: dict[str, Any] = {
        "arena": arena,
        "kv": torch.zeros(5, 16),
        "gate": torch.zeros(5, 16),
        "position_bias": torch.zeros(4, 16),
        "norm_weight": torch.ones(8),
        "cos": torch.ones(5, 2),
        "sin": torch.ones(5, 2),
        "cu_seqlens_q": sums([5]),
        "seqused_k": torch.tensor([5], dtype=torch.int32),
        "ring_table": torch.tensor([[0]], dtype=torch.int32),
        "slots": torch.zeros(5, dtype=torch.int64) + 4096 // UNIT * 2,
        "ratio": 4,
        "overlap": True,
        "ring_rows": 8,
        "ring_kv_offset": 0,
        "ring_gate_offset": 512,
        "rows_per_block": 4,
        "section_offset": 0,
        "entry_format": "float32",
        **change,
    }
    with pytest.raises(ValueError, match=f"compress: {message}"):
        hetkv.ops.compress(**arguments)
    assert bool((arena == 0xFF).all())


def test_opcheck_and_compile() -> None:
    arena = torch.zeros(4096, dtype=torch.uint8)
    tensors = (
        arena, torch.randn(5, 16), torch.randn(5, 16), torch.randn(4, 16), torch.ones(8), torch.ones(5, 2), torch.ones(5, 2),
        sums([5]), torch.tensor([5], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32), torch.full((5,), 40),
    )  # fmt: skip
    numbers = {
        "ratio": 4, "overlap": True, "ring_rows": 8, "ring_kv_offset": 0, "ring_gate_offset": 512, "rows_per_block": 4,
        "section_offset": 0, "entry_format": "float32",
    }  # fmt: skip
    torch.library.opcheck(torch.ops.hetkv.compress.default, tensors, numbers)
    eager, compiled = arena.clone(), arena.clone()
    hetkv.ops.compress(eager, *tensors[1:], **numbers)
    torch.compile(lambda *a: hetkv.ops.compress(*a, **numbers), fullgraph=True, backend="aot_eager")(compiled, *tensors[1:])
    assert torch.equal(compiled, eager)
    assert bool(eager.any())
