"""The CUDA kernels: 16-bit and packed shapes of models against float64, graphs replayed with changed batches, device contracts.

Skipped without a GPU. The other op tests run on CUDA as well, through on_device.py: see bench/gpu_check.sh. With
HETKV_TEST_DEVICE=cpu everything here runs on copies on the CPU, which tries this file and not the kernels.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import hetkv.ops
import on_device
from hetkv.ops import BlockStatus
from on_device import DEVICE, need_kernel, to_device
from paged_world import World, section, sums
from reference import attention
from test_ops_block_sparse import Routed as BlockRouted
from test_ops_blocks import arena_of, offsets, plain_checksum
from test_ops_compress import Compressor, Sequences
from test_ops_paged_attention import Batch
from test_ops_sparse import Index, Routed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not on_device.available(), reason="needs a CUDA device")]

# Without a cache of allocations nothing can be captured.
NO_GRAPHS = DEVICE.type == "cpu" or bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))
SIXTEEN_BITS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def _ops_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device.install(monkeypatch.setattr)


# --- shapes of models, against float64 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry_format", SIXTEEN_BITS)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("counts", [[1, 1, 1], [2, 0, 1], [40, 130, 3]], ids=["decode", "two tokens", "prefill"])
def test_grouped_attention(dim: int, entry_format: str, counts: list[int]) -> None:
    batch = Batch([300, 130, 64], heads=8, kv_heads=2, dim=dim, entry_format=entry_format, rows_per_block=64)
    query = batch.queries(counts, SIXTEEN_BITS[entry_format])
    batch.check(query, counts)
    batch.check(query, counts, window=128, sinks=batch.world.randn(8))


@pytest.mark.parametrize("heads", [(8, 1), (5, 5), (64, 8), (16, 2)], ids=str)
def test_groups_of_heads_and_a_soft_cap(heads: tuple[int, int]) -> None:
    batch = Batch([200, 77], heads=heads[0], kv_heads=heads[1], dim=64, entry_format="bfloat16", rows_per_block=16)
    for counts in ([1, 1], [30, 0]):
        batch.check(batch.queries(counts, torch.bfloat16), counts, softcap=20.0)


def test_a_long_sequence_is_split_and_merged() -> None:
    batch = Batch([5000, 17], heads=16, kv_heads=2, dim=128, entry_format="bfloat16", rows_per_block=64)
    for counts in ([1, 1], [3, 0]):
        batch.check(batch.queries(counts, torch.bfloat16), counts, sinks=batch.world.randn(16))


def test_attention_with_keys_that_are_values() -> None:
    batch = Batch([140, 60], heads=16, kv_heads=1, dim=512, entry_format="bfloat16", rows_per_block=64, shared=True)
    for counts in ([1, 1], [33, 2]):
        batch.check(batch.queries(counts, torch.bfloat16), counts, window=128)


@pytest.mark.parametrize("entry_format", ["fp8_packed", "bfloat16"])
@pytest.mark.parametrize("counts", [[1, 1], [2, 0], [20, 3]], ids=["decode", "two tokens", "prefill"])
@pytest.mark.parametrize("heads", [64, 128])
def test_routed_attention_of_deepseek_v4(entry_format: str, counts: list[int], heads: int) -> None:
    routed = Routed([330, 129], heads=heads, dim=512, window=128, row_format=entry_format, entry_format=entry_format)
    tokens = sum(counts)
    query = routed.world.randn(tokens, heads, 512).bfloat16()
    angle = routed.world.randn(tokens, 32)
    more = {"sinks": routed.world.randn(heads), "cos": angle.cos(), "sin": angle.sin()}
    routed.check(query, counts, routed.select(counts, 64), bound=2e-2, **more)
    routed.check(query, counts, None, bound=2e-2, **more)


@pytest.mark.parametrize("entry_format", SIXTEEN_BITS)
@pytest.mark.parametrize("counts", [[1, 1], [2, 0], [20, 3]], ids=["decode", "two tokens", "prefill"])
@pytest.mark.parametrize("heads", [16, 128])
def test_selected_tokens_of_deepseek_v32(entry_format: str, counts: list[int], heads: int) -> None:
    routed = Routed([430, 129], heads=heads, dim=576, window=0, ratio=1, entry_format=entry_format, value_dim=512)
    query = routed.world.randn(sum(counts), heads, 576).to(SIXTEEN_BITS[entry_format])
    routed.check(query, counts, routed.select(counts, 400), bound=2e-2)
    routed.check(query.float(), counts, routed.select(counts, 64), bound=2e-5)


@pytest.mark.parametrize("entry_format", SIXTEEN_BITS)
@pytest.mark.parametrize("counts", [[1, 1], [3, 0]], ids=["decode", "prefill"])
def test_block_routed_attention_of_minimax_m3(entry_format: str, counts: list[int]) -> None:
    routed = BlockRouted(
        [700, 257], heads=64, kv_heads=4, dim=128, index_dim=128, entry_format=entry_format, index_format=entry_format,
        rows_per_block=64, routed_tokens=128,
    )  # fmt: skip
    routed.check_scores(routed.index_queries(counts, SIXTEEN_BITS[entry_format]), counts, 1)
    routed.check(routed.queries(counts, SIXTEEN_BITS[entry_format]), counts, routed.select(counts, 4))


@pytest.mark.parametrize("entry_format", ["fp8_index", "mxfp4_index", "bfloat16"])
def test_index_scores_of_exact_products(entry_format: str) -> None:
    """Queries that 16 bits hold, so that only the order of the sums is the kernel's."""
    index = Index([700, 3, 133], heads=64, entry_format=entry_format)
    index.query = [rows.bfloat16().float() for rows in index.query]
    scores = hetkv.ops.index_scores(**index.arguments([690, 0, 132], [700, 3, 133]))
    row = 0
    for b, (begin, end) in enumerate([(690, 700), (0, 3), (132, 133)]):
        for position in range(begin, end):
            seen = (position + 1) // 4
            expected = attention.scores(index.query[b][position], index.weights[b][position], index.keys[b][:seen])
            bound = 1e-5 * 8 * max([1.0, *expected.abs().tolist()])
            torch.testing.assert_close(scores[row, :seen].double(), expected, rtol=1e-5, atol=bound)
            assert bool((scores[row, seen:] == -torch.inf).all())
            row += 1


@pytest.mark.parametrize("n", [1, 511, 512, 513, 8192, 16384, 16385, 100_000])
def test_top_k_of_long_rows(n: int) -> None:
    scores = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    scores[1] = scores[1].round()
    scores[2] = torch.where(scores[2] > 0, 0.0, -0.0)
    counts = torch.tensor([n, n // 2, max(n - 1, 1)], dtype=torch.int32)
    seen = torch.arange(n) < counts[:, None]
    order = torch.sort(torch.where(seen, scores + 0.0, -torch.inf), dim=-1, descending=True, stable=True).indices.int()
    expected = torch.where(torch.arange(n) < counts[:, None], order, -1)
    for k in (1, 64, 512):
        wanted = torch.full((3, k), -1, dtype=torch.int32)
        wanted[:, : min(k, n)] = expected[:, :k]
        assert torch.equal(hetkv.ops.top_k(scores, counts, k), wanted)


# --- blocks: what the device does where the CPU would raise -------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 511, 513, 8191, 8192, 8193, 37376, 100_001])
def test_the_checksum_is_the_one_defined(size: int) -> None:
    arena = arena_of(size + 1536)
    blocks = offsets(5, 2**31 - 1, 0, -1)
    sums_ = to_device_and_back("checksum_blocks", arena=arena, blocks=blocks, block_bytes=size)
    assert sums_[0] == plain_checksum(bytes(arena[1280 : 1280 + size].tolist()))
    assert sums_[2] == plain_checksum(bytes(arena[:size].tolist()))
    if DEVICE.type == "cuda":
        assert sums_[1] == sums_[3] == 0


def to_device_and_back(op: str, **arguments: Any) -> list[int]:
    """An op whose CPU kernel refuses some blocks: there, only the good ones are asked for."""
    if DEVICE.type == "cpu":
        blocks = arguments["blocks"]
        good = (blocks >= 0) & (blocks < 2**30)
        results = torch.zeros(len(blocks), dtype=torch.int64)
        results[good] = getattr(hetkv.ops, op)(**{**arguments, "blocks": blocks[good]}).long()
        return results.tolist()
    return getattr(hetkv.ops, op)(**arguments).tolist()  # type: ignore[no-any-return]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="an error there")
def test_ranges_that_do_not_fit_are_failed_checks() -> None:
    arena = torch.zeros(2048, dtype=torch.uint8)
    for zero, finite, status in [
        ([[0, 513]], [[0, 512, 0]], BlockStatus.PADDING),
        ([[-1, 4]], [[0, 512, 0]], BlockStatus.PADDING),
        ([[0, 512]], [[0, 516, 0]], BlockStatus.NOT_FINITE),
        ([[0, 512]], [[0, 6, 0]], BlockStatus.NOT_FINITE),
        ([[0, 512]], [[0, 8, 4]], BlockStatus.NOT_FINITE),
        ([[0, 512]], [[0, 512, 0]], BlockStatus(0)),
    ]:
        result = hetkv.ops.verify_blocks(
            arena, offsets(0, 3, 6, 7), block_bytes=512, zero_ranges=torch.tensor(zero), finite_ranges=torch.tensor(finite)
        )
        assert result.tolist() == [status, status, status, BlockStatus.OUTSIDE]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="an error there")
def test_bad_slots_blocks_and_pairs_are_skipped() -> None:
    arena = arena_of(4096)
    expected = arena.clone()
    expected[1024:1324] = arena[256:556]
    hetkv.ops.copy_blocks(arena, offsets(1, -1, 1, 99), offsets(4, 8, 2**31 - 1, 12), num_bytes=300)
    assert torch.equal(arena, expected)
    rows = torch.ones(4, 8)
    hetkv.ops.write_rows(
        arena, rows, torch.tensor([0, -1, 2**40, 15 * 8]), rows_per_block=8, section_offset=0, entry_format="float32"
    )
    expected[:32].view(torch.float32).fill_(1.0)
    expected[3840:3872].view(torch.float32).fill_(1.0)
    assert torch.equal(arena, expected)


# --- graphs -------------------------------------------------------------------------------------------------------------------


class Replay:
    """An op captured once over tensors that stay; called again after their contents have changed."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.outputs: Any = None
        if NO_GRAPHS:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # first use of a kernel may set its shared memory
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = run()

    def __call__(self) -> Any:
        if NO_GRAPHS:
            return self.run()
        self.graph.replay()
        return self.outputs


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Torch raises where it would wait for the device."""
    if DEVICE.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copies(arguments: Arguments, copy: Callable[[Tensor], Tensor]) -> Arguments:
    return {name: copy(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def results(op: str, arguments: Arguments, returned: Any) -> list[Tensor]:
    """What an op returned and what it wrote, on the CPU."""
    kept = [value.cpu().clone() for value in pytree.tree_leaves(returned) if isinstance(value, Tensor)]
    return kept + [arguments[name].cpu().clone() for name in on_device.written_arguments(op)]


def paged_batches() -> list[Arguments]:
    """Eight tokens of three sequences, some of them padding; the sequences change places in the table."""
    batch = Batch([400, 60, 129], heads=8, kv_heads=2, dim=64, entry_format="bfloat16", rows_per_block=16)
    columns = batch.table.shape[1]
    batches = []
    for order, counts, used in [
        ([0, 1, 2], [1, 1, 1], [400, 60, 129]),
        ([2, 1, 0], [4, 0, 4], [129, 0, 333]),
        ([1, 0, 2], [0, 8, 0], [0, 8, 0]),
        ([0, 1, 2], [0, 0, 0], [0, 0, 0]),
    ]:
        batches.append({
            "query": batch.world.randn(8, 8, 64).bfloat16(), "arena": batch.world.arena,
            "block_table": batch.table[order].view(3, columns).contiguous(), "cu_seqlens_q": sums(counts),
            "seqused_k": torch.tensor(used, dtype=torch.int32), "num_kv_heads": 2, "rows_per_block": 16,
            "key_offset": batch.keys.offset, "value_offset": batch.values.offset, "entry_format": "bfloat16", "scale": 0.125,
            "window": 200, "sinks": torch.zeros(8),
        })  # fmt: skip
    return batches


def sparse_batches() -> list[Arguments]:
    routed = Routed([330, 129, 40], heads=16, dim=512, window=128, row_format="fp8_packed", entry_format="fp8_packed")
    batches = []
    for order, counts, used in [
        ([0, 1, 2], [1, 1, 1], [330, 129, 40]),
        ([2, 0, 1], [2, 0, 3], [40, 0, 129]),
        ([0, 1, 2], [0, 0, 0], [0, 0, 0]),
    ]:
        selected = torch.full((6, 32), -1, dtype=torch.int32)
        for token, position in enumerate(p for c, u in zip(counts, used, strict=True) for p in range(u - c, u)):
            seen = torch.randperm((position + 1) // 4, generator=routed.world.random)[:32].int()
            selected[token, : len(seen)] = seen
        angle = routed.world.randn(6, 32)
        batches.append({
            "query": routed.world.randn(6, 16, 512).bfloat16(), "arena": routed.world.arena,
            "window_table": routed.window_table[order].contiguous(), "entry_table": routed.entry_table[order].contiguous(),
            "selected": selected, "cu_seqlens_q": sums(counts), "seqused_k": torch.tensor(used, dtype=torch.int32),
            **routed.numbers(), "sinks": routed.world.randn(16), "cos": angle.cos(), "sin": angle.sin(),
        })  # fmt: skip
    return batches


def block_batches(op: str) -> list[Arguments]:
    """As sparse_batches. Index keys and queries are small whole numbers, so that scores are exact."""
    routed = BlockRouted(
        [330, 129, 40], heads=32, kv_heads=2, dim=128, entry_format="bfloat16", index_format="bfloat16", rows_per_block=16,
        routed_tokens=32,
    )  # fmt: skip
    for b, rows in enumerate(routed.index_rows):
        routed.world.put(routed.index_at, routed.table[b], rows.round().float())
    batches = []
    for order, counts, used in [
        ([0, 1, 2], [1, 1, 1], [330, 129, 40]),
        ([2, 0, 1], [2, 0, 3], [40, 0, 129]),
        ([0, 1, 2], [0, 0, 0], [0, 0, 0]),
    ]:
        tables = {
            "arena": routed.world.arena, "block_table": routed.table[order].contiguous(), "cu_seqlens_q": sums(counts),
            "seqused_k": torch.tensor(used, dtype=torch.int32),
        }  # fmt: skip
        if op == "block_scores":
            batches.append({"query": routed.index_queries([6]).round(), **tables, **routed.score_numbers()})
            continue
        selected = torch.randint(-1, 11, (6, 2, 5), generator=routed.world.random, dtype=torch.int32)
        query, sinks = routed.queries([6], torch.bfloat16), routed.world.randn(32)
        batches.append({"query": query, "selected_blocks": selected, **tables, **routed.numbers(), "sinks": sinks})
    return batches


def index_batches() -> list[Arguments]:
    """Small whole numbers: every sum is exact, so that scores and ids must be equal bit for bit."""
    index = Index([300, 44], heads=8, entry_format="fp8_index")
    for b, keys in enumerate(index.keys):
        index.world.put(index.where, index.table[b], keys.round().float())
    index.query = [rows.round() for rows in index.query]
    index.weights = [rows.round() for rows in index.weights]
    return [index.arguments(begins, ends) for begins, ends in [([298, 42], [300, 44]), ([100, 0], [103, 1]), ([0, 44], [4, 44])]]


def selection_batches() -> list[Arguments]:
    return [{**batch, "k": 20} for batch in index_batches()]


def top_k_batches() -> list[Arguments]:
    return [
        {"scores": torch.randn(4, 3000).mul(8).round(), "counts": torch.tensor(counts, dtype=torch.int32), "k": 300}
        for counts in ([3000, 1, 0, 299], [0, 0, 0, 0], [300, 301, 2999, 7])
    ]


def write_batches() -> list[Arguments]:
    where = section("fp8_packed", 192, 4)
    world = World(1, 8, where.end)
    table = world.table([28], 4)
    batches = []
    for rows in ([*range(9)], [20, 3, 11, 27, 0, 5, 6, 7, 8]):
        slots = world.slots(table[0], rows, 4)
        slots[len(batches) :: 4] = -1
        batches.append({
            "arena": world.arena.clone(), "rows": world.randn(9, 192).bfloat16(), "slots": slots, "rows_per_block": 4,
            "section_offset": where.offset, "entry_format": "fp8_packed", "scale_offset": where.scale_offset,
        })  # fmt: skip
    return batches


def key_value_batches() -> list[Arguments]:
    where = section("bfloat16", 64, 8, heads=2)
    world = World(2, 6, 2 * where.end)
    table = world.table([30], 8)
    return [
        {
            "arena": world.arena.clone(), "key": world.randn(7, 2, 64).bfloat16(), "value": world.randn(7, 2, 64).bfloat16(),
            "slots": world.slots(table[0], rows, 8), "rows_per_block": 8, "key_offset": where.offset,
            "value_offset": -(-where.end // 16) * 16, "entry_format": "bfloat16",
        }
        for rows in ([*range(7)], [29, 1, 14, 3, 22, 9, 8])
    ]  # fmt: skip


def compress_batches() -> list[Arguments]:
    """The arguments of three steps of two sequences, 12 tokens each, whose lengths go through the windows' ends."""
    compressor = Compressor(4, True, 24)
    batches: list[Arguments] = []
    kept = hetkv.ops.compress

    def keep(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(kept).bind(*args, **kwargs).arguments
        batches.append(copies(bound, torch.clone))
        inspect.unwrap(kept)(*args, **kwargs)

    hetkv.ops.compress = keep
    try:
        sequences = Sequences(compressor, [30, 11])
        for counts, padding in [([9, 3], 0), ([7, 0], 5), ([4, 8], 0)]:
            sequences.step(counts, padding)
    finally:
        hetkv.ops.compress = kept
    return batches


def verify_batches() -> list[Arguments]:
    batches = []
    for seed, blocks in enumerate((offsets(0, 8, 16, 24), offsets(24, 8, 2**31 - 1, -1))):
        arena = arena_of(8192, seed)
        arena.view(torch.float32)[:] = 1.0 + seed
        arena[40:48] = 0
        arena[2100] = 0xFF
        arena[6400:6404] = 0xFF
        batches.append({
            "arena": arena, "blocks": blocks, "block_bytes": 2048,
            "checksums": torch.tensor([plain_checksum(bytes(arena[:2048].tolist()))] * 4),
            "zero_ranges": torch.tensor([[40, 48]]), "finite_ranges": torch.tensor([[48, 2048, 0], [0, 40, 2]]),
            "base_alignment": 256, "stride_alignment": 16,
        })  # fmt: skip
    return batches


def checksum_batches() -> list[Arguments]:
    return [
        {"arena": arena_of(40000, seed), "blocks": blocks, "block_bytes": 9001}
        for seed, blocks in enumerate((offsets(0, 40, 80), offsets(121, 0, 7)))
    ]


def copy_batches() -> list[Arguments]:
    """Apart, then with parts that overlap."""
    return [
        {"arena": arena_of(200_000, seed), "source": source, "target": target, "num_bytes": 40_007, "begin": 13}
        for seed, (source, target) in enumerate(((offsets(0, 0), offsets(200, 400)), (offsets(0, 500), offsets(3, 437))))
    ]


def transfer_batches() -> list[Arguments]:
    return [
        {
            "target_arena": arena_of(20_000, seed), "source_arena": arena_of(20_000, seed + 9), "source": source,
            "target": target, "num_bytes": 5000,
        }
        for seed, (source, target) in enumerate(((offsets(0, 20), offsets(20, 40)), (offsets(5, 5), offsets(0, 58))))
    ]  # fmt: skip


def row_batches(packed: str) -> list[Arguments]:
    batches = []
    for seed, slots in enumerate(([0, 9, 18], [17, 1, 8])):
        rows = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))
        batches.append({
            packed: rows, "arena": arena_of(1536, seed), "slots": torch.tensor(slots), "rows_per_block": 4, "section_offset": 16,
            "layer_stride": 160, "layer_begin": 1,
        })  # fmt: skip
    return batches


BATCHES: dict[str, tuple[Callable[[], list[Arguments]], float]] = {  # and how far from the CPU's result; 0: the same bytes
    "paged_attention": (paged_batches, 2e-2),
    "sparse_attention": (sparse_batches, 2e-2),
    "block_scores": (lambda: block_batches("block_scores"), 0),
    "block_sparse_attention": (lambda: block_batches("block_sparse_attention"), 2e-2),
    "index_scores": (index_batches, 0),
    "select_entries": (selection_batches, 0),
    "top_k": (top_k_batches, 0),
    "write_rows": (write_batches, 0),
    "write_key_value": (key_value_batches, 0),
    "compress": (compress_batches, 1e-5),
    "verify_blocks": (verify_batches, 0),
    "checksum_blocks": (checksum_batches, 0),
    "copy_blocks": (copy_batches, 0),
    "transfer_blocks": (transfer_batches, 0),
    "scatter_rows": (lambda: row_batches("rows"), 0),
    "gather_rows": (lambda: row_batches("out"), 0),
}


def test_every_op_has_batches_here() -> None:
    assert sorted(BATCHES) == sorted(on_device.OPS)


@pytest.mark.parametrize("op", BATCHES)
def test_a_captured_op_serves_changed_batches(op: str) -> None:
    """Replayed with new contents in the same tensors: the CPU's results, and the bits of the same call outside of a graph."""
    need_kernel(op)
    make, bound = BATCHES[op]
    torch.manual_seed(0)
    batches = make()
    function = inspect.unwrap(getattr(hetkv.ops, op))
    with torch.inference_mode():
        static = copies(batches[0], to_device)
        replay = Replay(lambda: function(**static))
        for batch in [*batches, batches[0]]:
            for name, value in batch.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
            replayed = results(op, static, replay())
            fresh = copies(batch, to_device)
            with no_waiting():
                returned = function(**fresh)
            eager = results(op, fresh, returned)
            on_cpu = copies(batch, lambda tensor: to_device(tensor, torch.device("cpu")))
            expected = results(op, on_cpu, function(**on_cpu))
            assert len(replayed) == len(eager) == len(expected) > 0
            for got, same, wanted in zip(replayed, eager, expected, strict=True):
                assert torch.equal(got.view(torch.uint8), same.view(torch.uint8))
                if bound == 0:
                    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
                    continue
                floats = [t.view(torch.float32) if t.dtype == torch.uint8 else t for t in (got, wanted)]
                torch.testing.assert_close(*floats, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="there are no streams")
def test_ops_run_on_the_current_stream() -> None:
    """Behind work of the same stream that takes long, and in front of a copy that reads the result."""
    arena, other = (to_device(arena_of(2**20, seed)) for seed in (0, 1))
    blocks = to_device(offsets(0, 1000))
    expected = hetkv.ops.checksum_blocks(other, blocks, block_bytes=4096)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        arena.copy_(other)
        found = hetkv.ops.checksum_blocks(arena, blocks, block_bytes=4096).clone()
    side.synchronize()
    assert torch.equal(found, expected)
