"""block_scores and block_sparse_attention against float64: ragged batches, forced blocks, choices per KV head, equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from paged_world import Section, World, section, sums
from reference import block_sparse, formats

INF = float("inf")
BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Routed:
    """Index keys, keys and values of some sequences in blocks of one world."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        index_dim: int = 32,
        entry_format: str = "float32",
        index_format: str = "float32",
        rows_per_block: int = 8,
        routed_tokens: int = 6,
        seed: int = 0,
    ) -> None:
        self.lengths, self.heads, self.kv_heads, self.dim, self.index_dim = lengths, heads, kv_heads, dim, index_dim
        self.routed_tokens, self.rows_per_block = routed_tokens, rows_per_block
        self.index_at: Section = section(index_format, index_dim, rows_per_block)
        self.keys_at = section(entry_format, dim, rows_per_block, heads=kv_heads, offset=-(-self.index_at.end // 16) * 16 + 16)
        self.values_at = section(entry_format, dim, rows_per_block, heads=kv_heads, offset=-(-self.keys_at.end // 16) * 16 + 16)
        blocks = sum(-(-n // rows_per_block) for n in lengths) + 1
        self.world = World(seed, blocks, self.values_at.end)
        self.table = self.world.table(lengths, rows_per_block)
        self.index_rows = [self.world.put(self.index_at, row, self.world.randn(n, index_dim)) for row, n in self._rows()]
        self.key_rows, self.value_rows = (
            [self.world.put(where, row, self.world.randn(n, kv_heads * dim)).view(n, kv_heads, dim) for row, n in self._rows()]
            for where in (self.keys_at, self.values_at)
        )

    def _rows(self) -> list[tuple[Tensor, int]]:
        return list(zip(self.table, self.lengths, strict=True))

    @property
    def num_blocks(self) -> int:
        return -(-self.table.shape[1] * self.rows_per_block // self.routed_tokens)

    def index_queries(self, counts: list[int], dtype: torch.dtype = torch.float32, heads: int | None = None) -> Tensor:
        return self.world.randn(sum(counts), heads or self.kv_heads, self.index_dim).to(dtype)

    def queries(self, counts: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.world.randn(sum(counts), self.heads, self.dim).to(dtype)

    def positions(self, counts: list[int]) -> list[tuple[int, int]]:
        return [(b, n - c + i) for b, (n, c) in enumerate(zip(self.lengths, counts, strict=True)) for i in range(c)]

    def select(self, counts: list[int], k: int) -> Tensor:
        """Random choices: in any order, with holes, a block twice, and one that lies behind the token."""
        lists = torch.full((sum(counts), self.kv_heads, k), -1, dtype=torch.int32)
        for token, (_, position) in enumerate(self.positions(counts)):
            for head in range(self.kv_heads):
                own = position // self.routed_tokens
                chosen = torch.randperm(own + 1, generator=self.world.random)[: max(1, k - 2)].tolist()
                chosen = [*chosen, chosen[0], own + 1][:k]
                places = torch.randperm(k, generator=self.world.random)[: len(chosen)]
                lists[token, head, places] = torch.tensor(chosen, dtype=torch.int32)
        return lists

    def score_numbers(self) -> dict[str, Any]:
        return {
            "rows_per_block": self.rows_per_block,
            "section_offset": self.index_at.offset,
            "entry_format": self.index_at.entry_format,
            "scale_offset": self.index_at.scale_offset,
            "routed_tokens": self.routed_tokens,
        }

    def numbers(self) -> dict[str, Any]:
        return {
            "num_kv_heads": self.kv_heads,
            "rows_per_block": self.rows_per_block,
            "key_offset": self.keys_at.offset,
            "value_offset": self.values_at.offset,
            "entry_format": self.keys_at.entry_format,
            "scale": self.dim**-0.5,
            "routed_tokens": self.routed_tokens,
        }

    def scores(self, query: Tensor, counts: list[int], used: list[int] | None = None, **more: Any) -> Tensor:
        used_k = torch.tensor(used or self.lengths, dtype=torch.int32)
        return hetkv.ops.block_scores(
            query, self.world.arena, self.table, sums(counts), used_k, **{**self.score_numbers(), **more}
        )

    def attend(
        self, query: Tensor, counts: list[int], selected: Tensor, used: list[int] | None = None, **more: Any
    ) -> tuple[Tensor, Tensor]:
        used_k = torch.tensor(used or self.lengths, dtype=torch.int32)
        return hetkv.ops.block_sparse_attention(
            query, self.world.arena, self.table, selected, sums(counts), used_k, **self.numbers(), **more
        )

    def check_scores(self, query: Tensor, counts: list[int], local_blocks: int) -> None:
        got = self.scores(query, counts, local_blocks=local_blocks)
        assert got.shape == (sum(counts), query.shape[1], self.num_blocks)
        for token, (b, position) in enumerate(self.positions(counts)):
            expected = block_sparse.block_scores(
                query[token],
                self.index_rows[b],
                position=position,
                routed_tokens=self.routed_tokens,
                local_blocks=local_blocks,
                num_blocks=self.num_blocks,
            )
            torch.testing.assert_close(got[token].double(), expected, rtol=1e-5, atol=1e-4)

    def check(self, query: Tensor, counts: list[int], selected: Tensor, **more: Any) -> None:
        out, lse = self.attend(query, counts, selected, **more)
        bound = BOUNDS[query.dtype]
        for token, (b, position) in enumerate(self.positions(counts)):
            expected, expected_lse = block_sparse.attention(
                query[token],
                self.key_rows[b],
                self.value_rows[b],
                selected[token],
                position=position,
                routed_tokens=self.routed_tokens,
                scale=self.dim**-0.5,
                sinks=more.get("sinks"),
            )
            torch.testing.assert_close(out[token].double(), expected, rtol=bound, atol=bound)
            torch.testing.assert_close(lse[token].double(), expected_lse, rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_scores_of_ragged_batches(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, min(n, 40))) for n in lengths]
    routed = Routed(
        lengths,
        index_dim=data.draw(st.sampled_from([32, 64])),
        index_format=data.draw(st.sampled_from([*formats.DTYPES, "fp8_index", "mxfp4_index"])),
        rows_per_block=data.draw(st.sampled_from([1, 8, 64])),
        routed_tokens=data.draw(st.sampled_from([1, 3, 16, 100, 128])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    heads = data.draw(st.sampled_from([1, 3, 4, 5, 64]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    routed.check_scores(routed.index_queries(counts, dtype, heads), counts, data.draw(st.integers(0, 3)))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_attention_of_ragged_batches(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, min(n, 9))) for n in lengths]
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 5), (3, 1), (1, 64), (2, 8), (2, 16)]))
    routed = Routed(
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([8, 24, 64])),
        entry_format=data.draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        rows_per_block=data.draw(st.sampled_from([1, 8, 64])),
        routed_tokens=data.draw(st.sampled_from([1, 3, 16, 100, 128])),
        seed=data.draw(st.integers(0, 2**16)),
    )
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    sinks = routed.world.randn(kv_heads * group) if data.draw(st.booleans()) else None
    routed.check(routed.queries(counts, dtype), counts, routed.select(counts, data.draw(st.integers(1, 9))), sinks=sinks)


@pytest.mark.parametrize("entry_format", ["float32", "bfloat16"])
def test_the_shape_of_minimax_m3(entry_format: str) -> None:
    """64 heads of 128 values over 4 KV heads, 16 of 17 blocks of 128 tokens, blocks of the arena that are smaller."""
    routed = Routed(
        [2100, 257], heads=64, kv_heads=4, dim=128, index_dim=128, entry_format=entry_format, index_format=entry_format,
        rows_per_block=64, routed_tokens=128,
    )  # fmt: skip
    counts = [1, 1]
    index_query = routed.index_queries(counts)
    routed.check_scores(index_query, counts, 1)
    chosen = hetkv.ops.top_k(routed.scores(index_query, counts).flatten(0, 1), None, 16).view(2, 4, 16)
    assert bool((chosen[0] == 16).any(dim=1).all()), "the token's own block"
    routed.check(routed.queries(counts), counts, chosen)


def test_values_as_keys() -> None:
    routed = Routed([60], heads=20, kv_heads=1, dim=24)
    query, selected = routed.queries([3]), routed.select([3], 4)
    numbers = {**routed.numbers(), "value_offset": routed.keys_at.offset}
    used = torch.tensor([60], dtype=torch.int32)
    out, _ = hetkv.ops.block_sparse_attention(query, routed.world.arena, routed.table, selected, sums([3]), used, **numbers)
    routed.value_rows = routed.key_rows
    for token in range(3):
        expected, _ = block_sparse.attention(
            query[token], routed.key_rows[0], routed.key_rows[0], selected[token],
            position=57 + token, routed_tokens=6, scale=24**-0.5, sinks=None,
        )  # fmt: skip
        torch.testing.assert_close(out[token].double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("group", "entry_format"), [(2, "float32"), (16, "bfloat16"), (16, "float16")])
def test_any_chunking_batch_and_number_of_threads_give_the_same_bits(group: int, entry_format: str) -> None:
    routed = Routed(
        [150, 40], heads=2 * group, kv_heads=2, dim=64, entry_format=entry_format, index_format=entry_format, routed_tokens=16
    )
    counts = [150, 40]
    query, selected, index_query = routed.queries(counts), routed.select(counts, 6), routed.index_queries(counts, heads=5)
    whole, whole_lse = routed.attend(query, counts, selected)
    whole_scores = routed.scores(index_query, counts)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cut in (1, 15, 16, 63, 64, 149):
            for begin, end in ((0, cut), (cut, 150)):
                part = [end - begin, 0]
                out, lse = routed.attend(query[begin:end].contiguous(), part, selected[begin:end].contiguous(), [end, 0])
                assert torch.equal(out, whole[begin:end])
                assert torch.equal(lse, whole_lse[begin:end])
                assert torch.equal(routed.scores(index_query[begin:end].contiguous(), part, [end, 0]), whole_scores[begin:end])
    torch.set_num_threads(before)


@pytest.mark.parametrize("group", [2, 16])
def test_the_order_of_a_list_and_what_names_nothing_do_not_matter(group: int) -> None:
    routed = Routed([64], heads=group, kv_heads=1, dim=64)
    query = routed.queries([1])
    wanted = routed.attend(query, [1], torch.tensor([[[2, 7, 10]]], dtype=torch.int32))
    for other in ([10, 2, 7, -1, -1], [-1, 7, 2, 7, -1, 10, 2], [11, 2, 10, 2**31 - 1, 7]):
        got = routed.attend(query, [1], torch.tensor([[other]], dtype=torch.int32))
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1], wanted[1])


@pytest.mark.parametrize("group", [2, 16])
def test_rows_that_are_not_seen_may_be_anything(group: int) -> None:
    """NaN in every row of another block and behind the token; and blocks of the arena that are nowhere."""
    routed = Routed([64], heads=group, kv_heads=1, dim=64, rows_per_block=4, routed_tokens=8)
    query, selected = routed.queries([2]), torch.tensor([[[1, 7]], [[1, 7]]], dtype=torch.int32)
    wanted = routed.attend(query, [2], selected, [62])
    for token in [*range(8), *range(16, 56), 62, 63]:
        for where in (routed.keys_at, routed.values_at):
            start = int(routed.table[0, token // 4]) * 256 + where.offset + token % 4 * where.row_bytes
            routed.world.arena[start : start + where.row_bytes] = 0xFF
    routed.table[0, :2], routed.table[0, 4:14] = 2**31 - 1, -7
    got = routed.attend(query, [2], selected, [62])
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert bool(got[0].isfinite().all())


def test_a_nan_that_is_seen_shows() -> None:
    routed = Routed([64], heads=16, kv_heads=1, dim=16, routed_tokens=8, rows_per_block=8)
    index_query = routed.index_queries([20])
    before = routed.scores(index_query, [20])
    start = int(routed.table[0, 6]) * 256 + routed.index_at.offset + 2 * routed.index_at.row_bytes  # token 50
    routed.world.arena[start : start + 4] = 0xFF
    after = routed.scores(index_query, [20])
    sees = torch.zeros(20, 1, 8, dtype=torch.bool)
    sees[12:, :, 6] = True  # positions 56 to 63: block 6 is not their own any more
    assert bool(after[sees].isnan().all())
    assert torch.equal(after[~sees], before[~sees])
    start = int(routed.table[0, 0]) * 256 + routed.keys_at.offset
    routed.world.arena[start : start + 4] = 0xFF
    lists = torch.tensor([[[0, 7]], [[1, 7]]], dtype=torch.int32)
    out, _ = routed.attend(routed.queries([2]), [2], lists)
    assert bool(out[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_forced_blocks() -> None:
    routed = Routed([40], routed_tokens=8)
    got = [routed.scores(routed.index_queries([1]), [1], local_blocks=n)[0, 0] for n in (0, 1, 2, 99)]
    assert [int((row == INF).sum()) for row in got] == [0, 1, 2, 5]
    assert [torch.nonzero(row == INF).flatten().tolist() for row in got[1:3]] == [[4], [3, 4]]


def test_padding_and_nothing() -> None:
    routed = Routed([20, 30])
    query, index_query = routed.queries([1, 1]), routed.index_queries([1, 1])
    query, index_query = torch.cat([query, query]), torch.cat([index_query, index_query])  # two tokens of no sequence
    selected = torch.zeros(4, 2, 3, dtype=torch.int32)
    out, lse = routed.attend(query, [1, 1], selected, [20, 0])
    assert bool(out[0].isfinite().all() and (out[0] != 0).any())
    assert bool((out[1:] == 0).all())
    assert bool((lse[1:] == -INF).all())
    scores = routed.scores(index_query, [1, 1], [20, 0])
    assert bool((scores[0, :, 3] == INF).all())
    assert bool((scores[1:] == -INF).all())
    for nothing in (torch.full((2, 2, 3), -1, dtype=torch.int32), torch.zeros(2, 2, 0, dtype=torch.int32)):
        out, lse = routed.attend(query[:2], [1, 1], nothing, sinks=torch.zeros(4))
        assert bool((out == 0).all())
        assert bool((lse == -INF).all())
    assert routed.attend(query[:0], [0, 0], selected[:0])[0].shape == (0, 4, 16)
    assert routed.scores(index_query[:0], [0, 0]).shape == (0, 2, routed.num_blocks)


ATTENTION_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"query": torch.zeros(2, 4, 16, dtype=torch.float64)}, "query.dtype"),
    ({"query": torch.zeros(2, 4, 520)}, r"query.size\(2\) = 520"),
    ({"num_kv_heads": 3}, "num_kv_heads = 3"),
    ({"selected_blocks": torch.zeros(2, 2, 1, dtype=torch.int64)}, "selected_blocks.dtype"),
    ({"selected_blocks": torch.zeros(2, 1, 1, dtype=torch.int32)}, r"selected_blocks.size\(1\) = 1"),
    ({"selected_blocks": torch.zeros(1, 2, 1, dtype=torch.int32)}, r"selected_blocks.size\(0\) = 1"),
    ({"selected_blocks": torch.full((2, 2, 1), -2, dtype=torch.int32)}, r"selected_blocks\[0, 0, 0\] = -2"),
    ({"block_table": torch.full((1, 3), 2**31 - 1, dtype=torch.int32)}, r"block_table\[0, 0\] = 2147483647"),
    ({"block_table": torch.zeros(1, 1, dtype=torch.int32), "selected_blocks": torch.full((2, 2, 1), 4, dtype=torch.int32)},
     r"block_table.size\(1\) = 1"),
    ({"entry_format": "fp8_packed"}, "entry_format"),
    ({"value_offset": 6}, "value_offset = 6"),
    ({"routed_tokens": 0}, "routed_tokens = 0"),
    ({"sinks": torch.zeros(3)}, r"sinks.size\(0\)"),
    ({"seqused_k": torch.tensor([1], dtype=torch.int32)}, r"seqused_k\[0\] = 1"),
    ({"query": torch.zeros(2, 4, 16, requires_grad=True)}, "query.requires_grad"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ATTENTION_REFUSALS)
def test_attention_refusals_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 16),
        "arena": torch.zeros(8192, dtype=torch.uint8),
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "selected_blocks": torch.zeros(2, 2, 1, dtype=torch.int32),
        "cu_seqlens_q": sums([2]),
        "seqused_k": torch.tensor([20], dtype=torch.int32),
        "num_kv_heads": 2,
        "rows_per_block": 8,
        "key_offset": 0,
        "value_offset": 1024,
        "entry_format": "float32",
        "scale": 1.0,
        "routed_tokens": 4,
        **change,
    }
    with pytest.raises(ValueError, match=f"block_sparse_attention: {message}"):
        hetkv.ops.block_sparse_attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 16, dtype=torch.float64)}, "query.dtype"),
        ({"query": torch.zeros(2, 65, 16)}, r"query.shape\[1:\] = 65 x 16"),
        ({"block_table": torch.tensor([[0, -1, 0]], dtype=torch.int32)}, r"block_table\[0, 1\] = -1"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, r"block_table.size\(1\) = 1"),
        ({"entry_format": "fp8_packed"}, "entry_format"),
        ({"section_offset": 6}, "section_offset = 6"),
        ({"routed_tokens": 0}, "routed_tokens = 0"),
        ({"local_blocks": -1}, "local_blocks = -1"),
        ({"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)}, r"cu_seqlens_q\[1\] = 3"),
        ({"query": torch.zeros(2, 4, 16, requires_grad=True)}, "query.requires_grad"),
    ],
)
def test_score_refusals_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 16),
        "arena": torch.zeros(8192, dtype=torch.uint8),
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "cu_seqlens_q": sums([2]),
        "seqused_k": torch.tensor([20], dtype=torch.int32),
        "rows_per_block": 8,
        "section_offset": 0,
        "entry_format": "float32",
        **change,
    }
    with pytest.raises(ValueError, match=f"block_scores: {message}"):
        hetkv.ops.block_scores(**arguments)


def test_far_blocks_are_read() -> None:
    """Blocks beyond 2^23, and bytes beyond 2^32: address space without memory, but for the pages that are written."""
    arena = torch.empty(5 * 2**30, dtype=torch.uint8)
    block = arena.numel() // 256 - 16
    arena[block * 256 :] = 0
    arena[block * 256 : block * 256 + 2048].view(torch.float32).copy_(torch.ones(512))
    table, used = torch.tensor([[block]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    out, _ = hetkv.ops.block_sparse_attention(
        torch.ones(1, 2, 16), arena, table, torch.zeros(1, 2, 1, dtype=torch.int32), sums([1]), used,
        num_kv_heads=2, rows_per_block=8, key_offset=0, value_offset=1024, entry_format="float32", scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, torch.ones(1, 2, 16))
    scores = hetkv.ops.block_scores(
        torch.ones(1, 1, 16), arena, table, sums([1]), used, rows_per_block=8, section_offset=0, entry_format="float32",
        routed_tokens=2, local_blocks=0,
    )  # fmt: skip
    assert scores.tolist() == [[[16.0, 16.0, -INF, -INF]]]


def test_opcheck_and_compile() -> None:
    routed = Routed([20, 30])
    counts = [2, 3]
    tables = (sums(counts), torch.tensor([20, 30], dtype=torch.int32))
    scored = (routed.index_queries(counts), routed.world.arena, routed.table, *tables)
    torch.library.opcheck(torch.ops.hetkv.block_scores.default, scored, routed.score_numbers())
    numbers = {**routed.numbers(), "sinks": torch.zeros(4)}
    tensors = (routed.queries(counts), routed.world.arena, routed.table, routed.select(counts, 4), *tables)
    torch.library.opcheck(torch.ops.hetkv.block_sparse_attention.default, tensors, numbers)

    def step(index_query: Tensor, query: Tensor, arena: Tensor, table: Tensor, *tables: Tensor) -> Tensor:
        scores = hetkv.ops.block_scores(index_query, arena, table, *tables, **routed.score_numbers())
        chosen = hetkv.ops.top_k(scores.flatten(0, 1), None, 2).unflatten(0, scores.shape[:2])
        return hetkv.ops.block_sparse_attention(query, arena, table, chosen, *tables, **numbers)[0]

    inputs = (scored[0], tensors[0], routed.world.arena, routed.table, *tables)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), step(*inputs))
