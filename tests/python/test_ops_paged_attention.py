"""paged_attention against float64: ragged batches, windows, groups of heads, sinks, soft cap; the same bits for any chunking."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from paged_world import Section, World, section, sums
from reference import attention

BOUNDS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Batch:
    """Keys and values of some sequences in blocks, and queries for their last tokens."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        entry_format: str = "float32",
        rows_per_block: int = 8,
        shared: bool = False,
        seed: int = 0,
        written_from: list[int] | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.keys: Section = section(entry_format, dim, rows_per_block, heads=kv_heads)
        behind = self.keys.offset if shared else -(-self.keys.end // 16) * 16 + 16
        self.values = section(entry_format, dim, rows_per_block, offset=behind, heads=kv_heads)
        blocks = sum(-(-n // rows_per_block) for n in lengths) + 1
        self.world = World(seed, blocks, self.values.end)
        self.table = self.world.table(lengths, rows_per_block)
        self.lengths = lengths
        self.key_rows: list[Tensor] = []
        self.value_rows: list[Tensor] = []
        for b, length in enumerate(lengths):
            first = written_from[b] if written_from else 0
            stored = []
            for where in [self.keys] if shared else [self.keys, self.values]:
                rows = torch.full((length, kv_heads * dim), float("nan"), dtype=torch.float64)
                rows[first:] = self.world.put(where, self.table[b], self.world.randn(length - first, kv_heads * dim), first)
                stored.append(rows.view(length, kv_heads, dim))
            self.key_rows.append(stored[0])
            self.value_rows.append(stored[-1])

    def queries(self, counts: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return self.world.randn(sum(counts), self.heads, self.dim).to(dtype)

    def run(self, query: Tensor, counts: list[int], used: list[int] | None = None, **settings_: Any) -> tuple[Tensor, Tensor]:
        defaults = {"scale": self.dim**-0.5, "window": 0, "sinks": None, "softcap": 0.0}
        return hetkv.ops.paged_attention(
            query,
            self.world.arena,
            self.table,
            sums(counts),
            torch.tensor(used or self.lengths, dtype=torch.int32),
            num_kv_heads=self.kv_heads,
            rows_per_block=self.keys.rows_per_block,
            key_offset=self.keys.offset,
            value_offset=self.values.offset,
            entry_format=self.keys.entry_format,
            **{**defaults, **settings_},
        )

    def expected(self, query: Tensor, counts: list[int], **settings_: Any) -> tuple[Tensor, Tensor]:
        defaults = {"scale": self.dim**-0.5, "window": 0, "sinks": None, "softcap": 0.0}
        outs, lses, token = [], [], 0
        for b, count in enumerate(counts):
            for i in range(count):
                out, lse = attention.paged(
                    query[token],
                    self.key_rows[b],
                    self.value_rows[b],
                    position=self.lengths[b] - count + i,
                    **{**defaults, **settings_},
                )
                outs.append(out)
                lses.append(lse)
                token += 1
        return torch.stack(outs), torch.stack(lses)

    def check(self, query: Tensor, counts: list[int], **settings_: Any) -> None:
        out, lse = self.run(query, counts, **settings_)
        expected, expected_lse = self.expected(query, counts, **settings_)
        bound = max(BOUNDS[query.dtype], 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ragged_batches_against_the_reference(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=4))
    counts = [data.draw(st.integers(0, min(n, 70))) for n in lengths]
    if sum(counts) == 0:
        counts[0] = 1
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 5), (3, 1), (1, 64), (2, 8)]))
    batch = Batch(
        lengths,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=data.draw(st.sampled_from([1, 8, 16, 40, 64, 72, 96])),
        entry_format=data.draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        rows_per_block=data.draw(st.sampled_from([1, 4, 16])),
        shared=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**16)),
    )
    sinks = batch.world.randn(batch.heads) if data.draw(st.booleans()) else None
    query = batch.queries(counts, data.draw(st.sampled_from(list(BOUNDS))))
    batch.check(
        query,
        counts,
        window=data.draw(st.sampled_from([0, 1, 2, 31, 64, 1000])),
        sinks=sinks,
        softcap=data.draw(st.sampled_from([0.0, 0.7, 20.0])),
    )


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_head_dimensions(dim: int) -> None:
    batch = Batch([200, 130], heads=8, kv_heads=2, dim=dim, rows_per_block=64)
    batch.check(batch.queries([1, 30]), [1, 30], window=128)


def test_a_long_sequence_is_split_and_merged() -> None:
    batch = Batch([3000], heads=4, kv_heads=1, dim=32, rows_per_block=64)
    batch.check(batch.queries([2]), [2], sinks=batch.world.randn(4))


@pytest.mark.parametrize("window", [0, 40])
def test_any_chunking_batch_and_number_of_threads_give_the_same_bits(window: int) -> None:
    batch = Batch([1300, 90], heads=6, kv_heads=2, dim=24, rows_per_block=16)
    query = batch.queries([300, 90])
    whole, whole_lse = batch.run(query, [300, 90], window=window)
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for cuts in ([1], [150], [299], [7, 8, 9, 100], list(range(1, 300, 13))):
            done = 0
            for begin, end in zip([0, *cuts], [*cuts, 300], strict=True):
                part = query[begin:end].contiguous()
                out, lse = batch.run(part, [end - begin, 0], [1000 + end, 0], window=window)
                assert torch.equal(out, whole[begin:end])
                assert torch.equal(lse, whole_lse[begin:end])
                done = end
            assert done == 300
    torch.set_num_threads(before)


# One token alone and few heads a group: keys are lanes. In a longer step, query rows are. (1, 5): rows are padded to 8.
@pytest.mark.parametrize("entry_format", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 2), (2, 4), (1, 5), (2, 8)])
def test_a_token_alone_has_the_bits_of_a_long_step(entry_format: str, kv_heads: int, group: int) -> None:
    batch = Batch([1090], heads=kv_heads * group, kv_heads=kv_heads, dim=64, entry_format=entry_format, rows_per_block=16)
    query = batch.queries([80])
    for more in ({}, {"window": 70, "softcap": 5.0, "sinks": batch.world.randn(batch.heads)}):
        whole, whole_lse = batch.run(query, [80], **more)
        for token in (0, 13, 14, 15, 78, 79):  # 1010, ..., 1024 keys, and so on: splits and chunks that begin, end, or are whole
            out, lse = batch.run(query[token : token + 1].contiguous(), [1], [1011 + token], **more)
            assert torch.equal(out[0], whole[token])
            assert torch.equal(lse[0], whole_lse[token])


def test_rows_that_slid_out_of_the_window_may_be_anything() -> None:
    """NaN below the window of the first token, and no block at all behind it."""
    batch = Batch([100], rows_per_block=8, written_from=[51])
    batch.table[0, :6] = 2**31 - 1
    batch.check(batch.queries([18]), [18], window=32)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize(("counts", "window", "token"), [(18, 0, 99), (18, 0, 90), (40, 32, 30), (40, 32, 64)])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_a_value_that_a_token_does_not_see_may_be_anything(bad: float, counts: int, window: int, token: int, group: int) -> None:
    """A value that is not finite reaches the tokens that see it, and leaves the bits of the others in the same step alone."""
    batch = Batch([100], heads=2 * group, kv_heads=2, rows_per_block=8)
    query = batch.queries([counts])
    before, before_lse = batch.run(query, [counts], window=window)
    start = int(batch.table[0, token // 8]) * 256 + batch.values.offset + (token % 8) * 2 * batch.dim * 4
    batch.world.arena[start : start + 2 * batch.dim * 4].view(torch.float32).fill_(bad)
    out, lse = batch.run(query, [counts], window=window)
    positions = torch.arange(100 - counts, 100)
    sees = (positions >= token) & (positions < token + (window or 100))
    assert bool(sees.any())
    assert not bool(sees.all())
    assert torch.equal(out[~sees], before[~sees])
    assert not bool(out[sees].isfinite().any())
    assert torch.equal(lse, before_lse)


def test_padding_and_an_empty_batch() -> None:
    batch = Batch([20, 30])
    query = batch.queries([1, 1, 3])
    out, lse = batch.run(query, [1, 1], [20, 0])
    assert bool((out[1:] == 0).all())
    assert bool((lse[1:] == -torch.inf).all())
    torch.testing.assert_close(out[:1].double(), batch.expected(query[:1], [1])[0], rtol=1e-5, atol=1e-5)
    out, lse = batch.run(query[:0], [0, 0])
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_a_sink_takes_all_where_it_is_much_larger() -> None:
    batch = Batch([5])
    out, lse = batch.run(batch.queries([1]), [1], sinks=torch.full((4,), 1000.0))
    assert bool((out == 0).all())
    assert bool(lse.isfinite().all())


def test_a_nan_in_a_key_that_is_seen_shows() -> None:
    batch = Batch([9], kv_heads=1, heads=2, rows_per_block=16)
    start = int(batch.table[0, 0]) * 256 + batch.keys.offset
    batch.world.arena[start : start + 4] = 0xFF
    out, _ = batch.run(batch.queries([1]), [1])
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 16, dtype=torch.float64)}, "query.dtype"),
        ({"query": torch.zeros(2, 4, 16).transpose(0, 1)}, "query.layout"),
        ({"query": torch.zeros(2, 4, 520)}, r"query.size\(2\)"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int64)}, "block_table.dtype"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, r"block_table.size\(0\)"),
        ({"block_table": torch.zeros(1, 1, dtype=torch.int32)}, r"block_table.size\(1\) = 1"),
        ({"block_table": torch.full((1, 3), 2**31 - 1, dtype=torch.int32)}, r"block_table\[0, 0\]"),
        ({"block_table": torch.tensor([[0, -1, 0]], dtype=torch.int32)}, r"block_table\[0, 1\] = -1"),
        ({"seqused_k": torch.tensor([1], dtype=torch.int32)}, r"seqused_k\[0\] = 1"),
        ({"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32)}, r"cu_seqlens_q\[1\] = 3"),
        ({"entry_format": "fp8_packed"}, "entry_format"),
        ({"window": -1}, "window = -1"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, r"sinks.size\(0\)"),
        ({"value_offset": 6}, "value_offset = 6"),
        ({"query": torch.zeros(2, 4, 16, requires_grad=True)}, "query.requires_grad"),
    ],
)
def test_refusals_name_op_and_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 4, 16),
        "arena": torch.zeros(8192, dtype=torch.uint8),
        "block_table": torch.zeros(1, 3, dtype=torch.int32),
        "cu_seqlens_q": sums([2]),
        "seqused_k": torch.tensor([20], dtype=torch.int32),
        "num_kv_heads": 2,
        "rows_per_block": 8,
        "key_offset": 0,
        "value_offset": 1024,
        "entry_format": "float32",
        "scale": 1.0,
        **change,
    }
    with pytest.raises(ValueError, match=f"paged_attention: {message}"):
        hetkv.ops.paged_attention(**arguments)


def test_far_blocks_are_read() -> None:
    """Blocks beyond 2^23, and bytes beyond 2^32: address space without memory, but for the pages that are written."""
    arena = torch.empty(5 * 2**30, dtype=torch.uint8)
    block = arena.numel() // 256 - 16
    arena[block * 256 :] = 0
    arena[block * 256 : block * 256 + 2048].view(torch.float32).copy_(torch.ones(512))
    out, _ = hetkv.ops.paged_attention(
        torch.ones(1, 2, 16), arena, torch.tensor([[block]], dtype=torch.int32), sums([1]), torch.tensor([3], dtype=torch.int32),
        num_kv_heads=2, rows_per_block=8, key_offset=0, value_offset=1024, entry_format="float32", scale=1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, torch.ones(1, 2, 16))


def test_opcheck_and_compile() -> None:
    batch = Batch([20, 30])
    query = batch.queries([2, 3])
    numbers = {
        "num_kv_heads": 2,
        "rows_per_block": 8,
        "key_offset": batch.keys.offset,
        "value_offset": batch.values.offset,
        "entry_format": "float32",
        "scale": 0.25,
        "sinks": torch.zeros(4),
    }
    tensors = (query, batch.world.arena, batch.table, sums([2, 3]), torch.tensor([20, 30], dtype=torch.int32))
    torch.library.opcheck(torch.ops.hetkv.paged_attention.default, tensors, numbers)
    compiled = torch.compile(lambda *a: hetkv.ops.paged_attention(*a, **numbers), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors)[0], hetkv.ops.paged_attention(*tensors, **numbers)[0])
