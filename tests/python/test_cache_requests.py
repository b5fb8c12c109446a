"""A request from end to end: reports, steps, publication, and what a freed sequence refuses."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import hetkv
from hetkv import _core

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


def test_a_request_and_the_next_one(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    forecast = cache.probe(prompt)
    assert forecast == hetkv.HitReport(
        100, 0, 0, 0, (hetkv.Loss(hetkv.LossReason.GRANULARITY, None, 4), hetkv.Loss(hetkv.LossReason.NOT_FOUND, None, 96))
    )
    seq = serve(cache, prompt, max_new_tokens=40)
    assert seq.report == forecast
    seq.append(np.arange(30, dtype=np.int32))
    stamp = seq.schedule(130)
    assert (stamp.begin, stamp.end) == (100, 130)
    assert (seq.scheduled, seq.settled) == (130, 100)
    assert seq.settle(stamp)
    assert seq.publish() == hetkv.PublishResult(128, hetkv.PublishOutcome.done)
    previous = seq.hashed_prefix()
    assert previous.num_tokens == 128
    seq.free()

    longer = np.concatenate([prompt, np.arange(30, dtype=np.int32), np.arange(50, dtype=np.int32)])
    with cache.admit(longer, previous=previous) as again:
        assert again.report.num_hash_hit_tokens == again.report.num_history_tokens == 128
        assert again.num_computed_tokens == again.report.num_recoverable_tokens == 96  # no checkpoint was staged at 112 and 128
        assert sum(loss.tokens for loss in again.report.losses) == 180 - 96
        assert again.report == cache.probe(longer)
        assert again.published_tokens == 96
        assert again.report.lost("group_missing") == 32
    cache.check_invariants()


def test_a_report_tells_decoded_state_from_chunks(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    seq = serve(cache, prompt[:32])
    for token in prompt[32:64].tolist():
        seq.append(token)
        seq.settle(seq.schedule(seq.num_tokens))
        if seq.num_tokens % 16 == 0:
            seq.commit_point(seq.num_tokens, dict.fromkeys(seq.stage_point(seq.num_tokens), seq.num_tokens))
    seq.publish()
    seq.free()
    for end, canonical in ((33, True), (49, False), (65, False)):
        assert cache.probe(prompt[:end]).canonical is None
        with cache.admit(prompt[:end]) as again:
            assert again.num_computed_tokens == end - 1
            assert again.report.canonical is canonical


def test_a_forecast_leaves_canonical_open(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    """Only an admission pins what it will read, so only its report says `canonical`; in all else the two are equal."""

    def forecast_and_admission(tokens: Tokens) -> tuple[hetkv.HitReport, hetkv.HitReport]:
        forecast = cache.probe(tokens)
        with cache.admit(tokens) as seq:
            return forecast, seq.report

    nothing, admitted = forecast_and_admission(prompt[:40] + 1)
    assert nothing.canonical is None
    assert admitted.canonical is True  # resuming at 0 is a cold run
    assert nothing == admitted
    serve(cache, prompt).free()
    for tokens in (prompt, prompt[:33], np.concatenate([prompt, prompt])):
        forecast, admitted = forecast_and_admission(tokens)
        assert forecast.num_recoverable_tokens > 0
        assert forecast.canonical is None
        assert admitted.canonical is True
        assert forecast == admitted
        assert hash(forecast) == hash(admitted)
        assert str(forecast) == str(admitted)
        assert pickle.loads(pickle.dumps(forecast)).canonical is None
    cache.set_model_version("w1")
    assert cache.probe(prompt).canonical is None


def test_report_reads_as_a_sentence(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    seq = serve(cache, prompt)
    assert str(seq.report) == "resume at 0 of 100 tokens (hash hit 0); lost: 4 granularity, 96 not_found"
    seq.free()
    assert cache.evict_object(prompt, 96, "win")
    seq = cache.admit(prompt)
    assert str(seq.report) == seq._core.report_text()
    assert "16 window_evicted in win" in str(seq.report)
    seq.free()
    with pytest.raises(AttributeError):
        seq.report.num_prompt_tokens = 3  # type: ignore[misc]


def test_reasons_are_those_of_the_core() -> None:
    assert tuple(hetkv.LossReason) == _core.loss_reasons()


def test_freed_sequences_are_refused(cache: hetkv.Cache, prompt: Tokens) -> None:
    seq = cache.admit(prompt)
    stamp = seq.schedule(16)
    seq.free()
    seq.free()
    assert not seq.live
    assert seq.report.num_prompt_tokens == 100
    assert seq.num_computed_tokens == 0
    assert "freed" in repr(seq)
    buffers = hetkv.StepBuffers(cache, 1, 16, 128)
    calls: dict[str, Callable[[], object]] = {
        "append": lambda: seq.append(1),
        "schedule": lambda: seq.schedule(32),
        "settle": lambda: seq.settle(stamp),
        "accept": lambda: seq.accept(1),
        "hold_acceptance": seq.hold_acceptance,
        "restart_from_settled": seq.restart_from_settled,
        "check_version": seq.check_version,
        "wants_point": lambda: seq.wants_point(16),
        "stage_point": lambda: seq.stage_point(16),
        "commit_point": lambda: seq.commit_point(16, {}),
        "publish": seq.publish,
        "hashed_prefix": seq.hashed_prefix,
        "block_table": lambda: seq.block_table("full"),
        "slot_mapping": lambda: seq.slot_mapping("full", 0, 1),
        "token_slots": lambda: seq.token_slots("full", 0, 1),
        "point_block": lambda: seq.point_block("state"),
        "live_block": lambda: seq.live_block("state"),
        "prepare_step": lambda: cache.prepare_step([seq], [1], buffers),
    }
    calls |= {
        name: lambda name=name: getattr(seq, name)
        for name in ("num_tokens", "scheduled", "settled", "accepted", "published_tokens", "version", "epoch", "ok")
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match="freed"):
            pytest.fail(f"{name} returned {call()!r}")


def test_with_frees_and_an_exception_publishes_nothing_more(cache: hetkv.Cache, prompt: Tokens) -> None:
    seq = cache.admit(prompt)
    seq.settle(seq.schedule(100))
    with pytest.raises(ZeroDivisionError), seq:
        _ = 1 / 0
    assert not seq.live
    assert cache.probe(prompt).num_hash_hit_tokens == 0
    with cache.admit(prompt) as seq:
        seq.settle(seq.schedule(100))
    assert cache.probe(prompt).num_history_tokens == 96  # the end of the turn


def test_a_sequence_keeps_its_cache_alive(hybrid_layout: hetkv.CacheLayout, prompt: Tokens) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB")
    seq, pinned, space = cache.admit(prompt), cache.pin_prefix(prompt), cache.namespace(salt="x")
    del cache
    gc.collect()
    seq.settle(seq.schedule(100))
    assert seq.publish().published_tokens == 96
    assert space.used_bytes == 0
    core, group_count = seq._core, len(seq._cache.layout.groups)
    del seq, space
    gc.collect()
    assert core.num_tokens == 100  # the bare core object too
    assert group_count == 5
    del core, pinned
    gc.collect()  # the allocator ends here and checks that no credit and no pin is out


def test_late_results_of_an_old_epoch_are_dropped(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        late = seq.schedule(32)
        seq.restart_from_settled()
        assert (seq.scheduled, seq.epoch) == (0, 2)
        assert not seq.settle(late)
        assert seq.settle(seq.schedule(48))
        assert seq.settled == 48
        assert cache.stats()["stale_steps"] == 1


def test_only_accepted_tokens_are_published(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.hold_acceptance()
        seq.settle(seq.schedule(100))
        assert seq.publish().published_tokens == 0
        seq.accept(50)
        assert seq.publish().published_tokens == 48
        assert seq.publish(upto=10**12).published_tokens == 48


def test_a_step_that_was_not_batch_invariant_is_not_canonical(cache: hetkv.Cache, prompt: Tokens) -> None:
    for invariant in (False, True):
        cache.clear()
        with cache.admit(prompt[:33]) as seq:
            for end in (16, 32):
                seq.settle(seq.schedule(end), batch_invariant=invariant or end == 16)
                for group, offset in seq.stage_point(end).items():
                    seq.commit_point(end, {group: end})
                    assert offset >= 0
            seq.publish()
        with cache.admit(prompt[:33]) as again:
            assert again.report.num_recoverable_tokens == 32
            assert again.report.canonical is invariant
