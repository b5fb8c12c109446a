"""Failures of other cache systems, replayed through the Python surface. Rows that are about the core alone are in tests/cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import hetkv
from hetkv import CacheLayout, DType, FieldSpec, GroupSpec, Loss, LossReason, ObjectKind, Retention
from model.plain_layout import PlainGroup, PlainLayout
from model.row_values import RowWriter, build_layout

BLOCK = 16
V4 = PlainLayout(
    "v4",
    BLOCK,
    (
        PlainGroup("csa", "compressed_kv", "history", ratio=4),
        PlainGroup("csa_index", "indexer_state", "history", ratio=4, indexes="csa"),
        PlainGroup("swa", "swa_window", "window", window=24),
        PlainGroup("csa_tail", "uncompressed_tail", "tail", ratio=4, overlap_rows=4),
    ),
)
STATE = PlainLayout(
    "state", BLOCK, (PlainGroup("full", "full_kv", "history"), PlainGroup("state", "recurrent_state", "snapshot"))
)
LONG = PlainLayout(
    "long", BLOCK, (PlainGroup("full", "full_kv", "history"), PlainGroup("swa", "swa_window", "window", window=33))
)


def make(layout: PlainLayout, capacity: Any = "4MiB", **options: Any) -> hetkv.Cache:
    return hetkv.Cache(build_layout(layout), capacity, **{"secret": 1, "retention": "all"} | options)


def ids(seed: int, count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, 1000, count).tolist()
    return tokens


def run(
    cache: hetkv.Cache, layout: PlainLayout, seq: hetkv.Sequence, writer: RowWriter, *, stage: bool = True, chunk: int = BLOCK
) -> None:
    while seq.scheduled < seq.num_tokens:
        begin, end = seq.scheduled, min(seq.num_tokens, seq.scheduled + chunk)
        stamp = seq.schedule(end)
        writer.write_step(cache, seq, begin, end, foreign=False)
        assert seq.settle(stamp)
        if stage and end % BLOCK == 0:
            staged = seq.stage_point(end)
            for group in layout.staged:
                if group.name in staged:
                    writer.write_state(cache, group, staged[group.name], end, foreign=False)
            seq.commit_point(end, dict.fromkeys(staged, end))
        seq.publish()


def serve(cache: hetkv.Cache, layout: PlainLayout, tokens: list[int], **options: Any) -> hetkv.HitReport:
    """One turn: what is resumed from is compared bit for bit, the rest is written and published."""
    space = options.pop("namespace", None)
    writer = RowWriter(layout, (cache.model_version, hash(space)))
    writer.extend(tokens)
    with cache.admit(tokens, space) as seq:
        writer.check_resume(cache, seq)
        run(cache, layout, seq, writer, **options)
        return seq.report


def test_A1_a_window_that_is_gone_is_never_read_from_elsewhere() -> None:
    """Blocks of an evicted window serve another text; the old prompt then resumes only where its own rows still are."""
    cache = make(V4)
    serve(cache, V4, ids(1, 130))
    cache.evict("swa_window", 1_000)
    serve(cache, V4, ids(2, 130))
    report = cache.probe(ids(1, 130))
    assert report.num_hash_hit_tokens == 128
    assert report.num_recoverable_tokens == 0
    assert report.lost(LossReason.WINDOW_EVICTED, "swa") == 128
    assert serve(cache, V4, ids(1, 130)).num_recoverable_tokens == 0
    assert serve(cache, V4, ids(1, 130)).num_recoverable_tokens == 128


def test_A4_history_without_its_tail_is_no_hit_and_reads_so() -> None:
    """Compressed entries alone restore nothing: the report says which kind is missing, in its text too."""
    cache = make(V4)
    serve(cache, V4, ids(1, 70), stage=False)
    report = cache.probe(ids(1, 70))
    assert report.losses == (
        Loss(LossReason.GRANULARITY, None, 6),
        Loss(LossReason.GROUP_MISSING, "swa", 64),
    )  # without its tail a checkpoint is not made at all, its window neither
    assert str(report) == "resume at 0 of 70 tokens (hash hit 64); lost: 6 granularity, 64 group_missing in swa"


def test_A6_content_without_its_index_is_no_hit() -> None:
    """An index block that is bad takes the entries that it selects with it, and the group is named."""
    cache = make(V4)
    serve(cache, V4, ids(1, 70))
    assert cache.quarantine(ids(1, 70), 48, "csa_index", LossReason.INDEX_STALE) == 2
    report = cache.probe(ids(1, 70))
    assert report.num_recoverable_tokens == 32
    assert report.losses[1:] == (Loss(LossReason.INDEX_STALE, "csa_index", 32),)


def test_B8_a_state_of_another_position_is_never_published() -> None:
    """A chunk ended at 37; its state is offered for 32 and for 48: refused with both positions, and nothing of it is taken."""
    cache = make(STATE)
    with cache.admit(ids(1, 60)) as seq:
        assert seq.settle(seq.schedule(37))
        for claimed in (32, 48):
            seq.stage_point(claimed)
            with pytest.raises(hetkv.PositionError) as refused:
                seq.commit_point(claimed, {"state": 37})
            assert (refused.value.group, refused.value.claimed, refused.value.actual) == ("state", claimed, 37)
        with pytest.raises(hetkv.ArgumentError):
            seq.stage_point(37)
        assert seq.settle(seq.schedule(60))
    report = cache.probe(ids(1, 60))
    assert (report.num_history_tokens, report.num_recoverable_tokens) == (48, 0)
    assert report.lost(LossReason.GROUP_MISSING, "state") == 48


def test_B8_one_wrong_proof_takes_none() -> None:
    """The proofs of one position are one step: a wrong one among them leaves the others uncommitted."""
    plain = PlainLayout("two", BLOCK, (*STATE.groups, PlainGroup("conv", "recurrent_state", "snapshot")))
    cache = make(plain)
    with cache.admit(ids(1, 20)) as seq:
        assert seq.settle(seq.schedule(16))
        assert set(seq.stage_point(16)) == {"state", "conv"}
        with pytest.raises(hetkv.PositionError):
            seq.commit_point(16, {"state": 16, "conv": 15})
        seq.commit_point(16, {"conv": 16})  # had the first been taken, this would complete it
        seq.publish()
    assert cache.probe(ids(1, 20)).num_recoverable_tokens == 0


def test_C14_layers_of_different_windows_cannot_share_a_group() -> None:
    """The window belongs to the group: mixed ones are refused when the layout is built, and the error names the field."""
    with pytest.raises(hetkv.LayoutError) as refused:
        CacheLayout.build(
            "mixed", 16,
            [GroupSpec("swa", ObjectKind.swa_window, Retention.window, owner_layers=[0, 1], layer_windows=[32, 1 << 20],
                       window=32, fields=[FieldSpec("k", DType.float32, [4])])],
        )  # fmt: skip
    assert (refused.value.group, refused.value.field) == ("swa", "layer_windows")


def test_D21_nothing_is_visible_before_its_bytes_are() -> None:
    """Scheduled is not settled: another request in the same step sees no hit, and the hit it sees later has the bytes."""
    cache = make(LONG)
    tokens = ids(1, 40)
    writer = RowWriter(LONG, (cache.model_version, hash(None)))
    writer.extend(tokens)
    with cache.admit(tokens) as seq:
        stamp = seq.schedule(40)
        assert seq.publish().published_tokens == 0
        assert cache.probe(tokens).num_hash_hit_tokens == 0
        writer.write_step(cache, seq, 0, 40, foreign=False)
        assert seq.settle(stamp)
        assert seq.publish().published_tokens == 32
    assert serve(cache, LONG, tokens).num_recoverable_tokens == 32


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, _: cache.admit([]),
        lambda cache, _: cache.admit([-1]),
        lambda cache, _: cache.admit([1 << 31]),
        lambda cache, _: cache.admit(np.array([-5], dtype=np.int32)),
        lambda cache, _: cache.admit([1.5, 2.0]),
        lambda cache, _: cache.admit(np.zeros((2, 2), dtype=np.int32)),
        lambda cache, _: cache.admit(torch.zeros(4)),
        lambda cache, _: cache.admit([1], max_new_tokens=-1),
        lambda cache, _: cache.admit([1], chunk_tokens=-1),
        lambda cache, _: cache.probe([]),
        lambda cache, _: cache.pin_prefix([]),
        lambda cache, _: cache.evict("full_kv", -1),
        lambda cache, _: cache.evict("full", 1),
        lambda cache, _: cache.evict_object([1] * 32, 8, "full"),
        lambda cache, _: cache.evict_object([1] * 32, 48, "full"),
        lambda cache, _: cache.evict_object([1] * 32, -16, "full"),
        lambda cache, _: cache.quarantine([1] * 32, 16, "nothing"),
        lambda cache, _: cache.set_quota(cache.namespace(), -1),
        lambda cache, _: cache.bytes_for(-1),
        lambda _, seq: seq.schedule(-1),
        lambda _, seq: seq.schedule(41),
        lambda _, seq: seq.append([-1]),
        lambda _, seq: seq.append(-1),
        lambda _, seq: seq.stage_point(-16),
        lambda _, seq: seq.slot_mapping("full", -1, 4),
        lambda _, seq: seq.slot_mapping("full", 4, 2),
        lambda _, seq: seq.slot_mapping("full", 0, 1000),
        lambda _, seq: seq.block_table("nothing"),
        lambda _, seq: seq.accept(1000),
    ],
)  # fmt: skip
def test_E15_bad_sizes_are_errors_and_change_nothing(call: Any) -> None:
    """Negative, fractional, out of range: a typed error that is also a ValueError, and every count as before."""
    cache = make(LONG)
    with cache.admit(ids(1, 40)) as seq:
        assert seq.settle(seq.schedule(20))
        before = cache.stats()
        with pytest.raises(hetkv.ArgumentError) as refused:
            call(cache, seq)
        assert isinstance(refused.value, ValueError)
        assert str(refused.value)
        assert cache.stats() == before
        assert (seq.scheduled, seq.settled, seq.num_tokens) == (20, 20, 40)
        assert seq.settle(seq.schedule(40))
    cache.check_invariants()


def test_G1_new_weights_match_nothing_old() -> None:
    """After an update the old entries are a loss "model_version"; when the weights come back, so do they."""
    cache = make(V4, model_version="w0")
    serve(cache, V4, ids(1, 70))
    cache.set_model_version("w1")
    report = cache.probe(ids(1, 70))
    assert (report.num_hash_hit_tokens, report.num_recoverable_tokens) == (64, 0)
    assert report.losses[1:] == (Loss(LossReason.MODEL_VERSION, None, 64),)
    assert serve(cache, V4, ids(1, 70)).num_recoverable_tokens == 0
    assert serve(cache, V4, ids(1, 70)).num_recoverable_tokens == 64
    cache.set_model_version("w0")
    assert serve(cache, V4, ids(1, 70)).num_recoverable_tokens == 64


def test_G1_rows_computed_beside_an_update_are_not_published() -> None:
    """An update arrives between two steps: what ran after it is never published, under either version, and says so."""
    cache = make(LONG, model_version="w0")
    with cache.admit(ids(1, 60)) as seq:
        assert seq.settle(seq.schedule(32))
        cache.set_model_version("w1")
        with pytest.raises(hetkv.StaleVersionError) as stale:
            seq.check_version()
        assert (stale.value.have, stale.value.running) == ("w0", "w1")
        assert seq.settle(seq.schedule(60))
        result = seq.publish()
        assert (result.published_tokens, result.status) == (32, hetkv.PublishOutcome.foreign_version)
    assert cache.probe(ids(1, 60)).num_history_tokens == 0
    cache.set_model_version("w0")
    assert cache.probe(ids(1, 60)).num_history_tokens == 32


def test_G4_every_fact_of_identity_counts() -> None:
    """Kernel ABI and alignment are part of what a hit must match, each with its own reason; equal facts match again."""
    cache = make(V4, abi={"window_attention": 1})
    serve(cache, V4, ids(1, 70))
    cache.set_abi("window_attention", 2)
    assert cache.probe(ids(1, 70)).losses[1:] == (Loss(LossReason.ABI, None, 64),)
    cache.set_abi("window_attention", 1)
    assert cache.probe(ids(1, 70)).num_recoverable_tokens == 64
    cache.declare_alignment("window_attention", 128)
    assert cache.probe(ids(1, 70)).losses[1:] == (Loss(LossReason.LAYOUT, None, 64),)
    with pytest.raises(hetkv.LayoutError):
        cache.declare_alignment("window_attention", 1 << 30)


def test_G7_equal_tokens_of_other_media_share_nothing() -> None:
    """Placeholder ids are equal, digests are not: no hit, whatever the order or the framing of the digests."""
    cache = make(V4)
    tokens = ids(1, 70)
    cat = cache.namespace(digests=["cat", "dog"])
    serve(cache, V4, tokens, namespace=cat)
    assert cache.probe(tokens, cache.namespace(digests=["cat", "dog"])).num_recoverable_tokens == 64
    others: list[dict[str, Any]] = [
        {}, {"digests": ["cat"]}, {"digests": ["dog", "cat"]}, {"digests": ["catdog"]}, {"digests": ["cat", "do"]},
        {"salt": "catdog"}, {"adapter": "cat", "digests": ["dog"]}, {"salt": "x", "digests": ["cat", "dog"]},
        {"digests": [b"cat", b"dog\0"]}, {"salt": "cat", "adapter": "dog"},
    ]  # fmt: skip
    spaces = [cache.namespace(**fields) for fields in others]
    assert len({cat, *spaces}) == len(others) + 1
    for space in spaces:
        assert cache.probe(tokens, space).num_hash_hit_tokens == 0
    assert cache.clear(cat) == 4
    assert cache.probe(tokens, cat).num_hash_hit_tokens == 0


def test_J1_a_long_prompt_needs_windows_for_one_step_only() -> None:
    """512 tokens through a window pool of a few blocks; sizing and admission are one function."""
    cache = make(LONG, "64KiB", caps={"swa_window": 512 * 8}, slab_bytes=512, retention="none")
    tokens = ids(1, 512)
    assert cache.bytes_for(512) < cache.bytes_for(512, chunk_tokens=512)
    writer = RowWriter(LONG, "j1")
    writer.extend(tokens)
    with cache.admit(tokens) as seq:
        reserved = {pool: numbers["blocks_reserved"] - 1 for pool, numbers in cache.stats()["pools"].items()}
        block = {group.name: group.block_bytes for group in cache.layout.groups}
        assert sum(count * block[name] for name, count in reserved.items()) == cache.bytes_for(512)
        run(cache, LONG, seq, writer)
        assert seq.settled == 512
        writer.check_rows(cache, seq, 512)


def test_J3_a_cache_that_is_too_small_is_refused_when_it_is_made() -> None:
    """Less than one block of every group, or than the floors: an error of the constructor that says what was needed."""
    with pytest.raises(hetkv.AdmissionError) as refused:
        make(LONG, 512, slab_bytes=512)
    assert not refused.value.retryable
    with pytest.raises(hetkv.AdmissionError):
        make(LONG, 1024, slab_bytes=512)  # only the scratch blocks fit, so no request ever would
    serve(make(LONG, 2048, slab_bytes=512, retention="none"), LONG, ids(1, 5))
    with pytest.raises(hetkv.AdmissionError) as refused:
        make(LONG, 8192, slab_bytes=512, floors={"swa_window": 17})
    assert (refused.value.kind, refused.value.need, refused.value.cap) == ("swa_window", 17 * 512, 8192)


def test_J5_short_now_is_not_impossible() -> None:
    """Below the capacity a refusal can be retried and takes nothing; above it, it is final at once, with need and cap."""
    cache = make(LONG, 16384, slab_bytes=512, retention="none")
    first = cache.admit(ids(1, 200))
    before = cache.stats()
    with pytest.raises(hetkv.AdmissionError) as short:
        cache.admit(ids(2, 200))
    assert short.value.retryable
    with pytest.raises(hetkv.AdmissionError) as never:
        cache.admit(ids(2, 2000))
    assert not never.value.retryable
    assert never.value.need > never.value.cap
    after = cache.stats()
    assert {**before, "refusals": 0} == {**after, "refusals": 0}
    assert after["refusals"] == {"impossible": 1, "no_room": 1, "quota": 0}
    first.free()
    cache.admit(ids(2, 200)).free()


def test_J5_more_than_the_whole_quota_takes_nothing() -> None:
    """A namespace's own prefixes make room for what fits its quota, never for what cannot: that is final, and changes nothing."""
    cache = make(LONG)
    space = cache.namespace(salt="tenant")
    serve(cache, LONG, ids(1, 70), namespace=space)
    cache.set_quota(space, 12_000)
    before = cache.stats()
    with pytest.raises(hetkv.AdmissionError) as never:
        cache.admit(ids(2, 2000), space)
    assert (never.value.kind, never.value.cap, never.value.retryable) == ("namespace", 12_000, False)
    assert {**before, "refusals": 0} == {**cache.stats(), "refusals": 0}
    assert cache.probe(ids(1, 70), space).num_recoverable_tokens == 64
    for seed in range(2, 6):
        serve(cache, LONG, ids(seed, 70), namespace=space)
        assert space.used_bytes <= 12_000
    assert cache.probe(ids(1, 70), space).num_recoverable_tokens == 0  # its own coldest made room
