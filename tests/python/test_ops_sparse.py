"""index_scores, top_k, select_entries and sparse_attention against float64; the same bits for any chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from paged_world import World, section, sums
from reference import attention, formats

INF, NAN = float("inf"), float("nan")


# --- top_k ---


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0000001, -1.0, INF, -INF, NAN, 3.5, 1e-40]), max_size=40),
    st.integers(1, 45),
    st.integers(0, 45),
)
def test_top_k_of_few_scores(row: list[float], k: int, count: int) -> None:
    scores = torch.tensor([row], dtype=torch.float32)
    assert hetkv.ops.top_k(scores, None, k).tolist() == [attention.best(scores[0], k)]
    counts = torch.tensor([count], dtype=torch.int32)
    assert hetkv.ops.top_k(scores, counts, k).tolist() == [attention.best(scores[0, :count], k)]


@pytest.mark.parametrize("kind", ["random", "mostly zero", "all equal", "few values", "one bit apart", "negative", "rising"])
@pytest.mark.parametrize("n", [257, 2048, 16383, 16385])
def test_top_k_of_many_scores(kind: str, n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    random = torch.randn(3, n, generator=generator)
    scores = {
        "random": random,
        "mostly zero": random * (torch.rand(3, n, generator=generator) > 0.9),
        "all equal": torch.full((3, n), -0.0),
        "few values": random.round(),
        "one bit apart": torch.randint(0x3F800000, 0x3F800010, (3, n), generator=generator).int().view(torch.float32),
        "negative": -random.abs() - 1,
        "rising": torch.arange(3 * n, dtype=torch.float32).view(3, n),
    }[kind]
    expected = torch.sort(scores.double() + 0.0, dim=-1, descending=True, stable=True).indices
    for k in (1, 512, n):
        assert torch.equal(hetkv.ops.top_k(scores, None, k), expected[:, :k].int()[:, : min(k, n)]) or k > n


def test_top_k_takes_strided_rows_and_refuses_others() -> None:
    scores = torch.randn(4, 20)[:, :10]
    assert torch.equal(hetkv.ops.top_k(scores, None, 3), hetkv.ops.top_k(scores.contiguous(), None, 3))
    for bad, message in [
        ((scores.double(), None, 3), "scores.dtype"),
        ((scores[0], None, 3), "scores.ndim"),
        ((scores.T, None, 3), r"scores.stride\(1\)"),
        ((scores, None, 0), "k = 0"),
        ((scores, torch.zeros(3, dtype=torch.int32), 3), r"counts.size\(0\)"),
    ]:
        with pytest.raises(ValueError, match=f"top_k: {message}"):
            hetkv.ops.top_k(*bad)


# --- the index ---


class Index:
    """Keys of entries in blocks, queries for all tokens of some sequences."""

    def __init__(
        self, lengths: list[int], *, heads: int = 6, entry_format: str = "float32", ratio: int = 4, seed: int = 0
    ) -> None:
        self.dim = {"float32": 24, "bfloat16": 24, "float16": 24, "fp8_index": 128, "mxfp4_index": 64, "fp8_packed": 128}[
            entry_format
        ]
        self.lengths, self.ratio, self.heads = lengths, ratio, heads
        self.where = section(entry_format, self.dim, 8)
        self.world = World(seed, sum(n // ratio // 8 + 2 for n in lengths), self.where.end)
        self.table = self.world.table([n // ratio for n in lengths], 8)
        self.keys = [
            self.world.put(self.where, self.table[b], self.world.randn(n // ratio, self.dim)) for b, n in enumerate(lengths)
        ]
        self.query = [self.world.randn(n, heads, self.dim) for n in lengths]
        self.weights = [self.world.randn(n, heads) for n in lengths]

    def arguments(self, begins: list[int], ends: list[int]) -> dict[str, Any]:
        def cut(rows: list[Tensor]) -> Tensor:
            return torch.cat([r[b:e] for r, b, e in zip(rows, begins, ends, strict=True)])

        return {
            "query": cut(self.query),
            "weights": cut(self.weights),
            "arena": self.world.arena,
            "block_table": self.table,
            "cu_seqlens_q": sums([e - b for b, e in zip(begins, ends, strict=True)]),
            "seqused_k": torch.tensor([e if e > b else 0 for b, e in zip(begins, ends, strict=True)], dtype=torch.int32),
            "ratio": self.ratio,
            "rows_per_block": 8,
            "section_offset": self.where.offset,
            "entry_format": self.where.entry_format,
            "scale_offset": self.where.scale_offset,
        }


@pytest.mark.parametrize("entry_format", [*formats.DTYPES, *formats.PACKED])
@pytest.mark.parametrize("heads", [1, 6, 64])
def test_index_scores_against_the_reference(entry_format: str, heads: int) -> None:
    index = Index([70, 3, 133], heads=heads, entry_format=entry_format)
    scores = hetkv.ops.index_scores(**index.arguments([50, 0, 0], [70, 3, 133]))
    row = 0
    for b, (begin, end) in enumerate([(50, 70), (0, 3), (0, 133)]):
        for position in range(begin, end):
            visible = (position + 1) // 4
            expected = attention.scores(index.query[b][position], index.weights[b][position], index.keys[b][:visible])
            bound = 1e-5 * max(1.0, float(expected.abs().max()) if visible else 0.0) * heads**0.5
            torch.testing.assert_close(scores[row, :visible].double(), expected, rtol=1e-5, atol=bound)
            assert bool((scores[row, visible:] == -INF).all())
            row += 1


def test_a_score_has_the_same_bits_wherever_its_key_stands() -> None:
    index = Index([400], heads=64)
    whole = hetkv.ops.index_scores(**index.arguments([399], [400]))[0, :100]
    order = torch.randperm(100)
    moved = Index([400], heads=64)
    moved.query, moved.weights = index.query, index.weights
    moved.world.put(moved.where, moved.table[0], index.keys[0][order].float())
    assert torch.equal(hetkv.ops.index_scores(**moved.arguments([399], [400]))[0, :100], whole[order])


def test_every_split_of_a_prompt_selects_the_same_entries() -> None:
    """All two-way splits of 300 tokens, with many scores that are exactly 0."""
    index = Index([300], heads=2)
    index.query[0] = index.query[0].round() * (torch.rand(300, 2, 24) > 0.8)
    index.world.put(index.where, index.table[0], index.keys[0].round().float())
    whole = hetkv.ops.select_entries(**index.arguments([0], [300]), k=16)
    assert torch.equal(whole, hetkv.ops.top_k(hetkv.ops.index_scores(**index.arguments([0], [300])), visible(range(300)), 16))
    for cut in range(1, 300):
        first = hetkv.ops.select_entries(**index.arguments([0], [cut]), k=16)
        second = hetkv.ops.select_entries(**index.arguments([cut], [300]), k=16)
        assert torch.equal(torch.cat([first, second]), whole)


def visible(positions: range) -> Tensor:
    return torch.tensor([(p + 1) // 4 for p in positions], dtype=torch.int32)


def test_selection_of_padding_is_empty() -> None:
    index = Index([9, 20])
    selected = hetkv.ops.select_entries(**index.arguments([9, 19], [9, 20]), k=7)
    assert selected.shape == (1, 7)
    assert sorted(selected[0].tolist()) == [-1, -1, 0, 1, 2, 3, 4]
    assert hetkv.ops.select_entries(**index.arguments([9, 20], [9, 20]), k=7).shape == (0, 7)
    assert hetkv.ops.select_entries(**index.arguments([0, 20], [3, 20]), k=2).tolist() == [[-1, -1]] * 3


# --- attention ---


class Routed:
    """Window rows and entries of some sequences in blocks of one world."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 5,
        dim: int = 24,
        window: int = 16,
        ratio: int = 4,
        row_format: str = "float32",
        entry_format: str = "float32",
        value_dim: int = 0,
        seed: int = 0,
    ) -> None:
        self.lengths, self.heads, self.dim, self.window, self.ratio = lengths, heads, dim, window, ratio
        self.value_dim = value_dim
        self.rows_at, self.entries_at = section(row_format, dim, 8), section(entry_format, dim, 2, offset=64)
        blocks = sum(n // 8 + 2 + n // ratio // 2 + 2 for n in lengths)
        self.world = World(seed, blocks, max(self.rows_at.end, self.entries_at.end))
        self.window_table = self.world.table(lengths, 8)
        self.entry_table = self.world.table([n // ratio for n in lengths], 2)
        self.rows = [self.world.put(self.rows_at, self.window_table[b], self.world.randn(n, dim)) for b, n in enumerate(lengths)]
        if window == 0:
            self.window_table = self.window_table[:, :0]
        self.entries = [
            self.world.put(self.entries_at, self.entry_table[b], self.world.randn(n // ratio, dim)) for b, n in enumerate(lengths)
        ]

    def numbers(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "window_rows_per_block": 8,
            "window_offset": self.rows_at.offset,
            "window_format": self.rows_at.entry_format,
            "window_scale_offset": self.rows_at.scale_offset,
            "ratio": self.ratio,
            "entry_rows_per_block": 2,
            "entry_offset": self.entries_at.offset,
            "entry_format": self.entries_at.entry_format,
            "entry_scale_offset": self.entries_at.scale_offset,
            "scale": self.dim**-0.5,
            "value_dim": self.value_dim,
        }

    def select(self, counts: list[int], k: int) -> Tensor:
        lists = []
        for length, count in zip(self.lengths, counts, strict=True):
            for position in range(length - count, length):
                seen = (position + 1) // self.ratio
                chosen = torch.randperm(seen, generator=self.world.random)[:k].tolist()
                lists.append(chosen + [-1] * (k - len(chosen)))
        return torch.tensor(lists, dtype=torch.int32).view(-1, k)

    def run(
        self, query: Tensor, counts: list[int], selected: Tensor | None, used: list[int] | None = None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        used_k = torch.tensor(used or self.lengths, dtype=torch.int32)
        return hetkv.ops.sparse_attention(
            query, self.world.arena, self.window_table, self.entry_table, selected, sums(counts), used_k, **self.numbers(), **more
        )

    def check(self, query: Tensor, counts: list[int], selected: Tensor | None, bound: float = 2e-5, **more: Any) -> None:
        out, lse = self.run(query, counts, selected, **more)
        token = 0
        for b, count in enumerate(counts):
            for i in range(count):
                position = self.lengths[b] - count + i
                chosen = list(range((position + 1) // self.ratio)) if selected is None else selected[token].tolist()
                rotation = (more["cos"][token], more["sin"][token]) if "cos" in more else None
                expected, expected_lse = attention.sparse(
                    query[token],
                    self.rows[b],
                    self.entries[b],
                    position=position,
                    window=self.window,
                    selected=[e for e in chosen if e >= 0],
                    scale=self.dim**-0.5,
                    sinks=more.get("sinks"),
                    rotation=rotation,
                    value_dim=self.value_dim,
                )
                torch.testing.assert_close(out[token].double(), expected, rtol=bound, atol=bound)
                torch.testing.assert_close(lse[token].double(), expected_lse, rtol=1e-5, atol=1e-4)
                token += 1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ragged_batches_against_the_reference(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, min(n, 30))) for n in lengths]
    dim = data.draw(st.sampled_from([8, 24, 64]))
    routed = Routed(
        lengths,
        heads=data.draw(st.sampled_from([1, 5, 16, 70])),
        dim=dim,
        window=data.draw(st.sampled_from([0, 1, 2, 16, 100])),
        value_dim=data.draw(st.sampled_from([0, 6, 7, dim - 1, dim])),
        ratio=data.draw(st.sampled_from([1, 4, 32])),
        row_format=data.draw(st.sampled_from(list(formats.DTYPES))),
        entry_format=data.draw(st.sampled_from(list(formats.DTYPES))),
        seed=data.draw(st.integers(0, 2**16)),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    query = routed.world.randn(sum(counts), routed.heads, routed.dim).to(dtype)
    selected = routed.select(counts, data.draw(st.integers(1, 20))) if data.draw(st.booleans()) else None
    more: dict[str, Tensor] = {}
    if data.draw(st.booleans()):
        more["sinks"] = routed.world.randn(routed.heads)
    if data.draw(st.booleans()):
        angle = routed.world.randn(sum(counts), 3)
        more |= {"cos": angle.cos(), "sin": angle.sin()}
    routed.check(query, counts, selected, bound={torch.float32: 2e-5, torch.float16: 3e-3}.get(dtype, 2e-2), **more)


@pytest.mark.parametrize("entry_format", ["fp8_packed", "bfloat16"])
def test_the_shape_of_deepseek_v4(entry_format: str) -> None:
    """64 heads of 512 values, a window of 128, packed rows, a selection of 64 of 80 entries."""
    routed = Routed([330, 129], heads=64, dim=512, window=128, row_format=entry_format, entry_format=entry_format)
    counts = [2, 1]
    angle = routed.world.randn(3, 32)
    routed.check(
        routed.world.randn(3, 64, 512), counts, routed.select(counts, 64),
        sinks=routed.world.randn(64), cos=angle.cos(), sin=angle.sin(),
    )  # fmt: skip


@pytest.mark.parametrize("form", [{}, {"window": 0, "ratio": 1, "value_dim": 48}], ids=["V4", "V3.2"])
def test_any_chunking_batch_and_number_of_threads_give_the_same_bits(form: dict[str, int]) -> None:
    routed = Routed([150, 40], heads=16, dim=64, **form)
    query, selected = routed.world.randn(190, 16, 64), routed.select([150, 40], 12)
    whole, _ = routed.run(query, [150, 40], selected)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cut in (1, 63, 64, 149):
            for begin, end in ((0, cut), (cut, 150)):
                part = (query[begin:end].contiguous(), [end - begin, 0], selected[begin:end].contiguous(), [end, 0])
                assert torch.equal(routed.run(*part)[0], whole[begin:end])
    torch.set_num_threads(before)


def test_a_list_of_none_is_not_all_entries() -> None:
    routed = Routed([64])
    query = routed.world.randn(1, 5, 24)
    empty, holes = torch.empty(1, 0, dtype=torch.int32), torch.full((1, 3), -1, dtype=torch.int32)
    for got, wanted in zip(routed.run(query, [1], empty), routed.run(query, [1], holes), strict=True):
        assert torch.equal(got, wanted)


def test_a_hole_in_the_selection_changes_nothing() -> None:
    routed = Routed([64])
    query = routed.world.randn(1, 5, 24)
    packed = routed.run(query, [1], torch.tensor([[3, 7, -1, -1]], dtype=torch.int32))[0]
    holes = routed.run(query, [1], torch.tensor([[-1, 3, -1, 7]], dtype=torch.int32))[0]
    assert torch.equal(packed, holes)


def test_window_only_padding_and_nothing() -> None:
    routed = Routed([20, 30])
    query = routed.world.randn(3, 5, 24)
    numbers = {name: value for name, value in routed.numbers().items() if name.startswith(("window", "scale", "value"))}
    used = torch.tensor([20, 0], dtype=torch.int32)
    out, lse = hetkv.ops.sparse_attention(
        query, routed.world.arena, routed.window_table, None, None, sums([1, 1]), used, **numbers
    )
    routed.entries = [e[:0] for e in routed.entries]
    expected, _ = attention.sparse(
        query[0],
        routed.rows[0],
        routed.entries[0],
        position=19,
        window=16,
        selected=[],
        scale=24**-0.5,
        sinks=None,
        rotation=None,
    )
    torch.testing.assert_close(out[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert bool((out[1:] == 0).all())
    assert bool((lse[1:] == -INF).all())
    empty = hetkv.ops.sparse_attention(
        query[:0], routed.world.arena, routed.window_table, None, None, sums([0, 0]), used, **numbers
    )
    assert empty[0].shape == (0, 5, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(1, 5, 24, dtype=torch.float64)}, "query.dtype"),
        ({"query": torch.zeros(1, 5, 600)}, r"query.shape\[1:\]"),
        ({"window": -1}, "window = -1"),
        ({"window": 0, "entry_table": None}, "entry_table = None"),
        ({"value_dim": 25}, "value_dim = 25"),
        ({"value_dim": -1}, "value_dim = -1"),
        ({"value_dim": 5, "cos": torch.zeros(1, 3), "sin": torch.zeros(1, 3)}, r"cos.size\(1\) = 3"),
        ({"ratio": 0}, "ratio = 0"),
        ({"selected": torch.tensor([[16]], dtype=torch.int32)}, r"selected\[0, 0\] = 16"),
        ({"selected": torch.tensor([[-2]], dtype=torch.int32)}, r"selected\[0, 0\] = -2"),
        ({"selected": torch.zeros(2, 1, dtype=torch.int32)}, r"selected.size\(0\)"),
        ({"entry_table": None, "selected": torch.zeros(1, 1, dtype=torch.int32)}, "entry_table = None"),
        ({"window_table": torch.full((1, 9), -5, dtype=torch.int32)}, r"window_table\[0, 6\] = -5"),
        ({"entry_table": torch.full((1, 9), 2**30, dtype=torch.int32)}, r"entry_table\[0, 0\]"),
        ({"entry_table": torch.zeros(1, 1, dtype=torch.int32)}, r"entry_table.size\(1\) = 1"),
        ({"window_format": "fp8_packed"}, "window_format"),
        ({"sinks": torch.zeros(4)}, r"sinks.size\(0\)"),
        ({"cos": torch.zeros(1, 2)}, "sin = None"),
        ({"query": torch.zeros(1, 5, 24, requires_grad=True)}, "query.requires_grad"),
    ],
)
def test_refusals_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    routed = Routed([64])
    arguments: dict[str, Any] = {
        "query": torch.zeros(1, 5, 24),
        "arena": routed.world.arena,
        "window_table": routed.window_table,
        "entry_table": routed.entry_table,
        "selected": None,
        "cu_seqlens_q": sums([1]),
        "seqused_k": torch.tensor([64], dtype=torch.int32),
        **routed.numbers(),
        **change,
    }
    with pytest.raises(ValueError, match=f"sparse_attention: {message}"):
        hetkv.ops.sparse_attention(**arguments)


def test_opcheck_and_compile() -> None:
    routed = Routed([30, 64])
    tensors = (
        routed.world.randn(2, 5, 24), routed.world.arena, routed.window_table, routed.entry_table, routed.select([1, 1], 4),
        sums([1, 1]), torch.tensor([30, 64], dtype=torch.int32),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hetkv.sparse_attention.default, tensors, routed.numbers())
    compiled = torch.compile(lambda *a: hetkv.ops.sparse_attention(*a, **routed.numbers()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors)[0], hetkv.ops.sparse_attention(*tensors, **routed.numbers())[0])
    index = Index([30])
    given_arguments = index.arguments([20], [30])
    names = ("query", "weights", "arena", "block_table", "cu_seqlens_q", "seqused_k")
    positional = tuple(given_arguments.pop(name) for name in names)
    torch.library.opcheck(torch.ops.hetkv.index_scores.default, positional, given_arguments)
    torch.library.opcheck(torch.ops.hetkv.select_entries.default, positional, {**given_arguments, "k": 5})
    torch.library.opcheck(torch.ops.hetkv.top_k.default, (torch.randn(3, 9), torch.tensor([1, 9, 0], dtype=torch.int32), 4))
