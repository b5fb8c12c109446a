"""Errors and refusals: typed, with fields that name what was wrong, and nothing changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

import hetkv

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (hetkv.ArgumentError("a", "1", "2"), ValueError),
        (hetkv.LayoutError("g", "f", "text"), ValueError),
        (hetkv.RouteError("full_kv", "slide"), ValueError),
        (hetkv.AdmissionError("full_kv", 5, 3, False, "text"), RuntimeError),
        (hetkv.StaleVersionError("w0", "w1"), RuntimeError),
        (hetkv.PositionError("tail", 16, 12), ValueError),
        (hetkv.NotClearedError(2), RuntimeError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_keep_their_fields(error: hetkv.HetkvError, base: type) -> None:
    assert isinstance(error, hetkv.HetkvError)
    assert isinstance(error, base)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert vars(again) == vars(error) != {}
    assert str(again) == str(error)


def test_layout_error_names_group_and_field(cache: hetkv.Cache) -> None:
    spec = hetkv.GroupSpec(
        "w",
        hetkv.ObjectKind.swa_window,
        hetkv.Retention.window,
        owner_layers=[0],
        fields=[hetkv.FieldSpec("k", hetkv.DType.float32, [4])],
    )
    with pytest.raises(hetkv.LayoutError) as caught:
        hetkv.CacheLayout.build("m", 16, [spec])
    assert (caught.value.group, caught.value.field) == ("w", "window")
    with pytest.raises(hetkv.LayoutError) as caught:
        cache.declare_alignment("window_attention", 2**20)
    assert (caught.value.group, caught.value.field) == ("full", "alignment")


def test_route_error_names_kind_and_operation(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq, pytest.raises(hetkv.RouteError) as caught:
        seq.commit_point(16, {"full": 16})
    assert (caught.value.kind, caught.value.operation) == ("full_kv", "publish_point")


def test_what_can_never_fit_is_refused_at_once(hybrid_layout: hetkv.CacheLayout) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", caps={"swa_window": "64KiB", "full_kv": "100KiB"})
    with pytest.raises(hetkv.AdmissionError) as caught:
        cache.admit(np.zeros(2000, np.int32))
    assert caught.value.kind == "full_kv"
    assert caught.value.cap == 100 * 1024 < caught.value.need
    assert not caught.value.retryable
    assert "admit" in str(caught.value)
    assert cache.stats()["refusals"] == {"impossible": 1, "no_room": 0, "quota": 0}


def test_memory_that_is_short_now_can_be_asked_for_again(hybrid_layout: hetkv.CacheLayout) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", caps={"full_kv": "100KiB"})
    tokens = np.arange(480, dtype=np.int32)  # 30 blocks of full_kv: 60 KiB
    first = cache.admit(tokens)
    with pytest.raises(hetkv.AdmissionError) as caught:
        cache.admit(tokens + 1000)
    assert caught.value.kind == "full_kv"
    assert caught.value.retryable
    first.free()
    cache.admit(tokens + 1000).free()


def test_schedule_refuses_and_changes_nothing(hybrid_layout: hetkv.CacheLayout) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", caps={"full_kv": "100KiB"}, retention="none")
    seq = cache.admit(np.arange(160, dtype=np.int32))
    seq.settle(seq.schedule(160))
    seq.append(np.arange(2000, dtype=np.int32))
    with pytest.raises(hetkv.AdmissionError, match="schedule"):
        seq.schedule(2160)
    assert (seq.scheduled, seq.settled, len(seq.block_table("full"))) == (160, 160, 10)
    seq.free()


def test_quota_is_an_admission_error_of_the_namespace(cache: hetkv.Cache, prompt: Tokens) -> None:
    space = cache.namespace(salt="tenant")
    cache.set_quota(space, "4KiB")
    with pytest.raises(hetkv.AdmissionError) as caught:
        cache.admit(prompt, space)
    assert caught.value.kind == "namespace"
    assert caught.value.cap == 4096 < caught.value.need
    cache.set_quota(space, None)
    cache.admit(prompt, space).free()
    assert cache.stats()["refusals"]["quota"] == 1


def test_position_error_commits_nothing(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.settle(seq.schedule(16))
        staged = seq.stage_point(16)
        assert set(staged) == {"tail", "state"}
        with pytest.raises(hetkv.PositionError) as caught:
            seq.commit_point(16, {"tail": 16, "state": 12})
        assert (caught.value.group, caught.value.claimed, caught.value.actual) == ("state", 16, 12)
        seq.commit_point(16, {"state": 16})  # the tail's proof was not taken, so the point is still incomplete
        seq.publish()
        assert cache.probe(prompt).num_recoverable_tokens == 0
        assert cache.probe(prompt).num_history_tokens == 16


def test_stale_version_error_names_both(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.check_version()
        cache.set_model_version("w1")
        with pytest.raises(hetkv.StaleVersionError) as caught:
            seq.check_version()
        assert (caught.value.have, caught.value.running) == ("0", "w1")
        seq.settle(seq.schedule(96))
        assert seq.publish() == (0, hetkv.PublishOutcome.foreign_version)
        cache.set_model_version("0")
        seq.check_version()
        cache.set_abi("window_attention", 3)
        with pytest.raises(hetkv.StaleVersionError, match="abi"):
            seq.check_version()


def fill_then_take_over(cache: hetkv.Cache) -> None:
    """Fills every slab with history of one kind and evicts it, so that whatever comes next takes slabs over."""
    for i in range(200):
        try:
            seq = cache.admit(np.arange(64, dtype=np.int32) + 1000 * i)
        except hetkv.AdmissionError:
            break
        seq.settle(seq.schedule(64))
        seq.free()
    cache.arena.fill_(0xFF)
    for kind in ("swa_window", "full_kv", "recurrent_state", "uncompressed_tail"):
        cache.evict(kind, blocks=10_000)


def test_blocks_that_changed_hands_are_zeroed(hybrid_layout: hetkv.CacheLayout, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "128KiB", slab_bytes="4KiB", retention="all")
    fill_then_take_over(cache)
    seen = 0
    seq = cache.admit(np.arange(320, dtype=np.int32), chunk_tokens=320)
    seq.schedule(320)
    for group in ("full", "comp", "win"):
        block_bytes = cache.layout.group(group).block_bytes
        for offset in seq.block_table(group).tolist():
            block = cache.arena[offset * 256 : offset * 256 + block_bytes]
            seen += int((block == 0).all())
    assert seen > 0
    seq.free()


def test_publishing_blocks_that_were_not_cleared_is_refused(hybrid_layout: hetkv.CacheLayout) -> None:
    cache = hetkv.Cache(hybrid_layout, "128KiB", slab_bytes="4KiB", retention="all")
    fill_then_take_over(cache)
    core = cache._core.admit(np.arange(320, dtype=np.int32), cache.namespace(), 0, 320)  # not the facade, which clears
    core.settle(core.schedule(320))
    ranges = core.ranges_to_clear()
    assert ranges
    assert all(0 <= begin < end <= cache.arena.numel() for begin, end in ranges)
    with pytest.raises(hetkv.NotClearedError) as caught:
        core.publish()
    assert caught.value.ranges == len(ranges)
    core.confirm_cleared()
    assert core.publish()[0] == 320
    core.free()
