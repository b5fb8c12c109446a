"""Cases for a GPU: every op at sizes that fill the card, with what it has to move or to compute. See bench_ops_cuda.py.

Memory-bound cases touch far more than the last cache, or another part of a large arena in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hetkv.ops

UNIT = 256
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One measured call. amount: bytes (bound "copy") or floating-point operations ("matmul"); target: share of that rate."""

    op: str
    name: str
    runs: list[Callable[[], object]]  # taken in turns
    amount: float
    bound: str
    target: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where cases run. `smallest`: sizes that only show that a case works."""

    device: str
    smallest: bool = False

    def size(self, full: int, small: int) -> int:
        return small if self.smallest else full

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.float32).to(dtype)

    def ints(self, values: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)

    def even(self, batch: int, each: int) -> Tensor:
        """cu_seqlens_q of `batch` sequences with `each` tokens of the step."""
        return self.ints(torch.arange(batch + 1) * each)


class Rows:
    """Random rows in shuffled blocks of 64; keys and, `copies` 2, values behind them. One sequence: `table` [1, blocks]."""

    PER_BLOCK = 64

    def __init__(self, bench: Bench, rows: int, width: int, entry_format: str, *, heads: int = 1, copies: int = 1) -> None:
        value_bytes = {"float32": 4, "fp8_packed": 0, "fp8_index": 0}.get(entry_format, 2)
        data = heads * width * value_bytes or {"fp8_packed": width + 64, "fp8_index": width}[entry_format]
        scales = {"fp8_packed": 8, "fp8_index": 4}.get(entry_format, 0)
        self.row_bytes = data + scales
        self.offsets = [copy * self.PER_BLOCK * data for copy in range(copies)]
        self.scale_offset = copies * self.PER_BLOCK * data
        self.units = -(-(self.scale_offset + self.PER_BLOCK * scales) // UNIT)
        self.entry_format = entry_format
        blocks = -(-rows // self.PER_BLOCK)
        self.arena = torch.zeros(blocks * self.units * UNIT, dtype=torch.uint8, device=bench.device)
        self.table = (torch.randperm(blocks) * self.units).int()[None].to(bench.device)
        slots = self.table[0].long()[:, None] * self.PER_BLOCK + torch.arange(self.PER_BLOCK, device=bench.device)
        self.slots = slots.flatten()[:rows].contiguous()
        for offset in self.offsets:
            for part in self.slots.split(2**16):
                hetkv.ops.write_rows(self.arena, bench.randn(len(part), heads, width), part, **self.place(offset))

    def place(self, offset: int = 0) -> dict[str, Any]:
        return {
            "rows_per_block": self.PER_BLOCK,
            "section_offset": offset,
            "entry_format": self.entry_format,
            "scale_offset": self.scale_offset,
        }


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Ops, and what makes a case of each; nothing is allocated before it is called."""
    for packed in (True, False):
        yield "write_rows", lambda packed=packed: write(bench, packed)
    yield "write_key_value", lambda: write_key_value(bench)
    yield "compress", lambda: compress(bench, 4, True)
    yield "compress", lambda: compress(bench, 128, False)
    yield "scatter_rows", lambda: row_copy(bench, False)
    yield "gather_rows", lambda: row_copy(bench, True)
    yield "checksum_blocks", lambda: verify(bench, None)
    for finite in (False, True):
        yield "verify_blocks", lambda finite=finite: verify(bench, finite)
    for kib in (16, 64, 1024):
        yield "copy_blocks", lambda kib=kib: copy(bench, kib)
    for shape in ((64, 8, 64), (32, 8, 128), (16, 8, 256)):
        yield "paged_attention", lambda shape=shape: decode(bench, *shape)
    yield "paged_attention", lambda: window_decode(bench)
    for *shape, target in ((64, 8, 64, 0.45), (32, 8, 128, 0.45), (16, 8, 256, 0.3), (16, 1, 512, 0.3)):
        yield "paged_attention", lambda shape=shape, target=target: prefill(bench, *shape, target)
    for tokens in (1, 16, 128):
        for stored in ("fp8_packed", "bfloat16"):
            yield "sparse_attention", lambda tokens=tokens, stored=stored: routed(bench, tokens, 64, stored, False)
    yield "sparse_attention", lambda: routed(bench, 128, 128, "fp8_packed", False)
    yield "sparse_attention", lambda: routed(bench, 2048, 64, "fp8_packed", True)
    for tokens in (1, 128):
        yield "sparse_attention", lambda tokens=tokens: selected_tokens(bench, tokens)
    for tokens in (1, 16, 1024):
        yield "index_scores", lambda tokens=tokens: scores(bench, tokens, False)
    yield "select_entries", lambda: scores(bench, 16, True)
    for rows, n in ((1, 8192), (1, 262_144), (64, 32_768)):
        yield "top_k", lambda rows=rows, n=n: top_k(bench, rows, n)


def write(bench: Bench, packed: bool) -> Case:
    count, width, rope = bench.size(2**18, 100), 512, 64
    rows = Rows(bench, count, width, "fp8_packed" if packed else "bfloat16")
    source, norm = bench.randn(count, width), bench.randn(width, dtype=torch.float32)
    cos, sin = (bench.randn(count, rope // 2, dtype=torch.float32) for _ in range(2))
    more = {"norm_weight": norm, "cos": cos, "sin": sin} if packed else {}
    amount = count * (2.0 * width + rows.row_bytes + 8 + (4 * rope if packed else 0))
    name = f"{count:,} rows of 512, " + ("norm, rope, packed FP8" if packed else "plain bf16")
    return Case(
        "write_rows", name, [lambda: hetkv.ops.write_rows(rows.arena, source, rows.slots, **rows.place(), **more)],
        amount, "copy", 0.8,
    )  # fmt: skip


def write_key_value(bench: Bench) -> Case:
    count, heads, dim = bench.size(2**16, 100), 8, 128
    rows = Rows(bench, count, dim, "bfloat16", heads=heads, copies=2)
    key, value = bench.randn(count, heads, dim), bench.randn(count, heads, dim)
    cos, sin = (bench.randn(count, dim // 2, dtype=torch.float32) for _ in range(2))

    def run() -> None:
        hetkv.ops.write_key_value(
            rows.arena, key, value, rows.slots, rows_per_block=64, key_offset=rows.offsets[0], value_offset=rows.offsets[1],
            entry_format="bfloat16", cos=cos, sin=sin,
        )  # fmt: skip

    amount = count * (4.0 * heads * dim * 2 + 4 * dim + 16)
    return Case("write_key_value", f"{count:,} tokens, 8 heads of 128, rope", [run], amount, "copy", 0.8)


def compress(bench: Bench, ratio: int, overlap: bool) -> Case:
    tokens, width, rope = bench.size(2**16, 512), 512, 64
    raw = width * (2 if overlap else 1)
    kv, gate = bench.randn(tokens, raw), bench.randn(tokens, raw)
    bias, norm = bench.randn(ratio, raw, dtype=torch.float32), torch.ones(width, device=bench.device)
    cos, sin = (bench.randn(tokens, rope // 2, dtype=torch.float32) for _ in range(2))
    entries = Rows(bench, tokens // ratio, width, "fp8_packed")
    ring_rows = ratio * (2 if overlap else 1)
    ring_unit = entries.arena.numel() // UNIT
    arena = torch.cat([entries.arena, torch.zeros(2 * ring_rows * raw * 2, dtype=torch.uint8, device=bench.device)])
    slots = torch.zeros(tokens, dtype=torch.int64, device=bench.device)
    slots[ratio - 1 :: ratio] = entries.slots
    cu, used, ring = bench.ints([0, tokens]), bench.ints([tokens]), bench.ints([[ring_unit]])

    def run() -> None:
        hetkv.ops.compress(
            arena, kv, gate, bias, norm, cos, sin, cu, used, ring, slots, ratio=ratio, overlap=overlap, ring_rows=ring_rows,
            ring_kv_offset=0, ring_gate_offset=ring_rows * raw * 2, **entries.place(),
        )  # fmt: skip

    # With overlap a window reads 2 * ratio rows, half of each: every byte once more than without, but from a cache.
    amount = 2.0 * tokens * raw * 2 + tokens // ratio * (entries.row_bytes + 4 * rope)
    return Case("compress", f"{'CSA' if overlap else 'HCA'}, {tokens:,} tokens, packed FP8", [run], amount, "copy", 0.8)


def row_copy(bench: Bench, gather: bool) -> Case:
    layers, row_bytes, per_block = 8, 1024, 64
    count = bench.size(2**15, 64)
    layer_stride = per_block * row_bytes
    units = layers * layer_stride // UNIT
    blocks = count // per_block
    arena = torch.zeros(blocks * units * UNIT, dtype=torch.uint8, device=bench.device)
    packed = torch.ones(layers, count, row_bytes, dtype=torch.uint8, device=bench.device)
    slots = (torch.randperm(blocks)[:, None] * units * per_block + torch.arange(per_block)).flatten().to(bench.device)
    place = {"rows_per_block": per_block, "section_offset": 0, "layer_stride": layer_stride}
    run = (
        (lambda: hetkv.ops.gather_rows(packed, arena, slots, **place))
        if gather
        else (lambda: hetkv.ops.scatter_rows(arena, packed, slots, **place))
    )
    return Case(
        "gather_rows" if gather else "scatter_rows",
        f"{count:,} rows of 1 KiB, 8 layers",
        [run],
        2.0 * packed.numel(),
        "copy",
        0.8,
    )


def verify(bench: Bench, finite: bool | None) -> Case:
    """finite: None: the checksum alone; False: compared with a stored one; True: and every value finite."""
    block = 148 * UNIT  # 64 packed rows of 584 bytes, rounded up
    count = bench.size(2**14, 8)
    arena = torch.zeros(count * block, dtype=torch.uint8, device=bench.device)
    arena.view(torch.int64).random_(0, 2**60)
    blocks = (torch.randperm(count) * (block // UNIT)).int().to(bench.device)
    if finite is None:
        return Case(
            "checksum_blocks", f"{count:,} blocks of 37 KiB",
            [lambda: hetkv.ops.checksum_blocks(arena, blocks, block_bytes=block)], 1.0 * arena.numel(), "copy", 0.8,
        )  # fmt: skip
    sums = torch.zeros(count, dtype=torch.int64, device=bench.device)
    ranges = torch.tensor([[0, block, 2]], device=bench.device) if finite else None

    def run() -> object:
        return hetkv.ops.verify_blocks(arena, blocks, block_bytes=block, checksums=sums, finite_ranges=ranges)

    name = f"{count:,} blocks of 37 KiB" + (", all values finite" if finite else "")
    return Case("verify_blocks", name, [run], 1.0 * arena.numel(), "copy", 0.8)


def copy(bench: Bench, kib: int) -> Case:
    size = bench.size(512 * MIB, 4 * MIB)
    arena = torch.zeros(2 * size, dtype=torch.uint8, device=bench.device)
    block = kib * 1024
    count, units = size // block, block // UNIT
    order = torch.randperm(2 * count)
    source, target = ((part * units).int().to(bench.device) for part in order.split(count))
    return Case(
        "copy_blocks", f"{count:,} blocks of {kib} KiB",
        [lambda: hetkv.ops.copy_blocks(arena, source, target, num_bytes=block)], 2.0 * size, "copy", 0.8,
    )  # fmt: skip


def attention_run(rows: Rows, query: Tensor, table: Tensor, cu: Tensor, used: Tensor, *, kv_heads: int, window: int = 0) -> Any:
    return lambda: hetkv.ops.paged_attention(
        query, rows.arena, table, cu, used, num_kv_heads=kv_heads, rows_per_block=64, key_offset=rows.offsets[0],
        value_offset=rows.offsets[-1], entry_format="bfloat16", scale=query.shape[-1] ** -0.5, window=window,
    )  # fmt: skip


def decode(bench: Bench, heads: int, kv_heads: int, dim: int) -> Case:
    batch, length = bench.size(16, 2), bench.size(16_384, 256)
    rows = Rows(bench, batch * length, dim, "bfloat16", heads=kv_heads, copies=2)
    run = attention_run(
        rows, bench.randn(batch, heads, dim), rows.table.view(batch, -1), bench.even(batch, 1), bench.ints([length] * batch),
        kv_heads=kv_heads,
    )  # fmt: skip
    name = f"decode, {batch} x {length:,} tokens, {heads}/{kv_heads} heads of {dim}"
    return Case("paged_attention", name, [run], 4.0 * batch * length * kv_heads * dim, "copy", 0.8)


def window_decode(bench: Bench) -> Case:
    batch, length, window, kv_heads, dim = bench.size(1024, 2), 192, 128, 8, 64
    rows = Rows(bench, batch * length, dim, "bfloat16", heads=kv_heads, copies=2)
    run = attention_run(
        rows, bench.randn(batch, 64, dim), rows.table.view(batch, -1), bench.even(batch, 1), bench.ints([length] * batch),
        kv_heads=kv_heads, window=window,
    )  # fmt: skip
    name = f"window decode, {batch:,} sequences, W 128, 64/8 heads of 64"
    return Case("paged_attention", name, [run], 4.0 * batch * window * kv_heads * dim, "copy", 0.8)


def prefill(bench: Bench, heads: int, kv_heads: int, dim: int, target: float) -> Case:
    length = bench.size(8192, 256)
    rows = Rows(bench, length, dim, "bfloat16", heads=kv_heads, copies=1 if dim == 512 else 2)
    run = attention_run(
        rows, bench.randn(length, heads, dim), rows.table, bench.ints([0, length]), bench.ints([length]), kv_heads=kv_heads
    )
    name = f"causal prefill of {length:,}, {heads}/{kv_heads} heads of {dim}"
    return Case("paged_attention", name, [run], 4.0 * dim * heads * length * (length + 1) / 2, "matmul", target)


def routed(bench: Bench, tokens: int, heads: int, stored: str, one_sequence: bool) -> Case:
    """V4: 128 window rows and 512 of many entries for each token. Decoding: a sequence a token; else one chunk of a prompt."""
    dim, window, k, ratio = 512, 128, bench.size(512, 64), 4
    tokens = min(tokens, bench.size(tokens, 4))
    batch = 1 if one_sequence else tokens
    each = max(bench.size(2**18, 1024) // batch // 64 * 64, 256)  # entries of a sequence
    length = each * ratio
    entries = Rows(bench, batch * each, dim, stored)
    recent = Rows(bench, batch * (4096 if one_sequence else 192) if not bench.smallest else 64 * 64, dim, stored)
    arena = torch.cat([recent.arena, entries.arena])
    entry_table = entries.table.view(batch, -1) + recent.arena.numel() // UNIT
    columns = length // 64
    spread = torch.arange(batch * columns, device=bench.device) % recent.table.shape[1]
    window_table = recent.table[0][spread].view(batch, columns).contiguous()  # only the last columns are read
    query = bench.randn(tokens, heads, dim)
    cu = bench.even(batch, tokens // batch)
    used = bench.ints([length] * batch)
    sinks = bench.randn(heads, dtype=torch.float32)
    cos, sin = (bench.randn(tokens, 32, dtype=torch.float32) for _ in range(2))
    fewest = (length - tokens // batch + 1) // ratio

    def run_with(selected: Tensor) -> Callable[[], object]:
        return lambda: hetkv.ops.sparse_attention(
            query, arena, window_table, entry_table, selected, cu, used, window=window, window_rows_per_block=64,
            window_offset=0, window_format=stored, window_scale_offset=recent.scale_offset, ratio=ratio,
            entry_rows_per_block=64, entry_offset=0, entry_format=stored, entry_scale_offset=entries.scale_offset,
            scale=dim**-0.5, sinks=sinks, cos=cos, sin=sin,
        )  # fmt: skip

    picks = [torch.randint(fewest, (tokens, k), device=bench.device).int() for _ in range(bench.size(4, 2))]
    amount = 4.0 * tokens * heads * dim * (window + k)
    kind = f"chunk of {tokens:,}" if one_sequence else f"decode of {tokens}"
    target = 0.3 if one_sequence else 0.35 if tokens == 128 else None
    return Case(
        "sparse_attention", f"V4 {kind}, {heads} heads of 512, 128 + {k} {stored} rows", [run_with(pick) for pick in picks],
        amount, "matmul", target,
    )  # fmt: skip


def selected_tokens(bench: Bench, tokens: int) -> Case:
    """V3.2: 2048 tokens of many for each token, keys of 576 values of which 512 are the value. Decoding: a sequence a token."""
    heads, dim, value_dim, k = 128, 576, 512, bench.size(2048, 64)
    tokens = min(tokens, bench.size(tokens, 4))
    each = max(bench.size(2**19, 1024) // tokens // 64 * 64, 256)
    rows = Rows(bench, tokens * each, dim, "bfloat16")
    table = rows.table.view(tokens, -1)
    query, cu, used = bench.randn(tokens, heads, dim), bench.even(tokens, 1), bench.ints([each] * tokens)

    def run_with(selected: Tensor) -> Callable[[], object]:
        return lambda: hetkv.ops.sparse_attention(
            query, rows.arena, table[:, :0], table, selected, cu, used, window=0, window_rows_per_block=64, window_offset=0,
            window_format="bfloat16", ratio=1, entry_rows_per_block=64, entry_offset=0, entry_format="bfloat16",
            scale=dim**-0.5, value_dim=value_dim,
        )  # fmt: skip

    picks = [torch.randint(each, (tokens, k), device=bench.device).int() for _ in range(bench.size(4, 2))]
    return Case(
        "sparse_attention", f"V3.2 decode of {tokens}, {heads} heads of 576/512, {k} bfloat16 rows",
        [run_with(pick) for pick in picks], 2.0 * tokens * heads * (dim + value_dim) * k, "matmul",
    )  # fmt: skip


def scores(bench: Bench, tokens: int, select: bool) -> Case:
    """64 heads of 128 against 32k FP8 keys: a sequence a token, but one prompt's chunk for 1,024."""
    heads, dim, each = 64, 128, bench.size(32_768, 256)
    batch = tokens if tokens <= 16 else 1
    tokens = tokens if tokens <= 16 else bench.size(tokens, 4)
    keys = Rows(bench, batch * each, dim, "fp8_index")
    query, weights = bench.randn(tokens, heads, dim), bench.randn(tokens, heads, dtype=torch.float32)
    cu, used = bench.even(batch, tokens // batch), bench.ints([each] * batch)
    arguments: dict[str, Any] = {"ratio": 1, **keys.place()}
    table = keys.table.view(batch, -1)
    op = "select_entries" if select else "index_scores"
    if select:
        arguments["k"] = bench.size(512, 16)
    name = f"{tokens:,} tokens, 64 heads of 128, {each:,} FP8 keys"
    return Case(
        op, name, [lambda: getattr(hetkv.ops, op)(query, weights, keys.arena, table, cu, used, **arguments)],
        2.0 * tokens * heads * dim * each, "matmul",
    )  # fmt: skip


def top_k(bench: Bench, rows: int, n: int) -> Case:
    n = min(n, bench.size(n, 1000))
    scores_ = bench.randn(rows, n, dtype=torch.float32)
    return Case("top_k", f"512 of {n:,}, {rows} rows", [lambda: hetkv.ops.top_k(scores_, None, 512)], 4.0 * rows * n, "copy")
