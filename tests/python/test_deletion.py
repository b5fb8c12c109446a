"""Every object of a published DeepSeek-V4 prompt is taken away in turn: the hit must shrink exactly, name the group, and heal.

The layout comes from a transformers config: ratios 4 and 128, window 128, blocks of 64 tokens. Every position has its checkpoint.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

import hetkv
from hetkv import CacheLayout, Loss, LossReason

transformers = pytest.importorskip("transformers")

BLOCK = 64
DEPTH = 5
REST = 3  # tokens behind the last whole block
HISTORY = ("csa_kv", "csa_index", "hca_kv")
POINTS = ("swa", "csa_tail", "csa_index_tail", "hca_tail")
TOKENS = np.random.default_rng(7).integers(0, 500, DEPTH * BLOCK + REST, dtype=np.int32)


@pytest.fixture(scope="module")
def layout() -> CacheLayout:
    config = transformers.DeepseekV4Config(
        vocab_size=512, hidden_size=32, moe_intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, head_dim=16,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        q_lora_rank=16, partial_rotary_factor=0.25, o_groups=2, o_lora_rank=8, n_routed_experts=4, num_experts_per_tok=2,
        hc_mult=2, hc_sinkhorn_iters=2, sliding_window=128, index_n_heads=2, index_head_dim=12, index_topk=8,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    )  # fmt: skip
    made = CacheLayout.from_config(config, block_size=BLOCK)
    assert tuple(group.name for group in made.groups) == HISTORY + POINTS
    return made


@pytest.fixture
def cache(layout: CacheLayout) -> hetkv.Cache:
    cache = hetkv.Cache(layout, "4MiB", secret=1, retention="all")
    serve(cache, TOKENS)
    return cache


def serve(cache: hetkv.Cache, tokens: npt.NDArray[np.int32]) -> int:
    """Computes a prompt from wherever it resumes, publishes all of it, and returns where it resumed."""
    with cache.admit(tokens) as seq:
        while seq.scheduled < seq.num_tokens:
            upto = min(seq.num_tokens, (seq.scheduled // BLOCK + 1) * BLOCK)
            assert seq.settle(seq.schedule(upto))
            if upto % BLOCK == 0:
                seq.commit_point(upto, dict.fromkeys(seq.stage_point(upto), upto))
        return seq.num_computed_tokens


def prompt(depth: int) -> npt.NDArray[np.int32]:
    """The shortest prompt that could resume at ``depth`` blocks, and a little more."""
    return TOKENS[: depth * BLOCK + REST]


def asked_at(group: str, depth: int) -> bool:
    """Whether R(depth * 64) names an object of the group there: 128-token windows of HCA are open at odd depths only."""
    return group != "hca_tail" or depth % 2 == 1


def losses(report: hetkv.HitReport) -> list[Loss]:
    assert report.losses[0] == Loss(LossReason.GRANULARITY, None, REST)
    return list(report.losses[1:])


def test_nothing_taken_nothing_lost(cache: hetkv.Cache) -> None:
    for depth in range(1, DEPTH + 1):
        report = cache.probe(prompt(depth))
        assert (report.num_recoverable_tokens, losses(report)) == (depth * BLOCK, [])


@pytest.mark.parametrize(("group", "depth"), list(product(POINTS, range(1, DEPTH + 1))))
@pytest.mark.parametrize("how", ["evict", "quarantine"])
def test_a_point_object_is_taken(cache: hetkv.Cache, group: str, depth: int, how: str) -> None:
    def take() -> bool:
        if how == "evict":
            return cache.evict_object(TOKENS, depth * BLOCK, group)
        return cache.quarantine(TOKENS, depth * BLOCK, group) == 1

    assert take() == asked_at(group, depth)
    assert not take()
    for asked in range(1, DEPTH + 1):
        # A window of 127 rows needs the two blocks that it ends in; a tail only its own.
        broken = {depth, depth + 1} if group == "swa" else {depth} if asked_at(group, depth) else set()
        end = max(e for e in range(asked + 1) if e not in broken)
        report = cache.probe(prompt(asked))
        assert report.num_hash_hit_tokens == report.num_history_tokens == asked * BLOCK
        assert report.num_recoverable_tokens == end * BLOCK
        lost = losses(report)
        assert [(loss.group, loss.tokens) for loss in lost] == ([(group, (asked - end) * BLOCK)] if end < asked else [])
        if how == "evict" and lost:
            assert lost[0].reason == (LossReason.WINDOW_EVICTED if group == "swa" else LossReason.TAIL_EVICTED)
    heals(cache, depth)


@pytest.mark.parametrize(("group", "depth"), list(product(HISTORY, range(1, DEPTH + 1))))
def test_a_history_block_is_taken(cache: hetkv.Cache, group: str, depth: int) -> None:
    """Everything above hangs on it, so inside the chain it can only break; what is below stays a hit, checkpoint and all."""
    gone = cache.evict_object(TOKENS, depth * BLOCK, group)
    assert gone == (depth == DEPTH)  # only a leaf may be evicted
    if not gone:
        assert cache.quarantine(TOKENS, depth * BLOCK, group, LossReason.CHECKSUM) == DEPTH - depth + 1
    for asked in range(1, DEPTH + 1):
        report = cache.probe(prompt(asked))
        end = min(asked, depth - 1)
        assert report.num_history_tokens == report.num_recoverable_tokens == end * BLOCK
        if end == asked:
            assert losses(report) == []
        elif gone:
            assert losses(report) == [Loss(LossReason.EVICTED, None, (asked - end) * BLOCK)]
        else:
            assert report.num_hash_hit_tokens == asked * BLOCK
            assert losses(report) == [Loss(LossReason.CHECKSUM, group, (asked - end) * BLOCK)]
    heals(cache, depth)


def heals(cache: hetkv.Cache, depth: int) -> None:
    """Prompts that end there, and at the end, are computed again from where they can be; then every one resumes at its end."""
    for again in (depth, DEPTH):
        before = cache.probe(prompt(again)).num_recoverable_tokens
        assert serve(cache, prompt(again)) == before
    for asked in range(1, DEPTH + 1):
        report = cache.probe(prompt(asked))
        assert (report.num_recoverable_tokens, losses(report)) == (asked * BLOCK, [])
    cache.check_invariants()


def test_all_at_once(cache: hetkv.Cache) -> None:
    """Without any window nothing can be resumed from, however much history there is; and it says so."""
    assert cache.evict("swa_window", 1_000) == DEPTH
    report = cache.probe(TOKENS)
    assert (report.num_hash_hit_tokens, report.num_recoverable_tokens) == (DEPTH * BLOCK, 0)
    assert losses(report) == [Loss(LossReason.WINDOW_EVICTED, "swa", DEPTH * BLOCK)]
    assert serve(cache, TOKENS) == 0
    assert cache.probe(TOKENS).num_recoverable_tokens == DEPTH * BLOCK
