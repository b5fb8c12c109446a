"""The Python surface: what it accepts, what it refuses and how, and that it keeps its promises about memory and threads."""

from __future__ import annotations

import gc
import inspect
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hetkv
from hetkv import _core
from hetkv.byte_size import byte_size
from hetkv.tokens import as_token_ids

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


# --- tokens ------------------------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Tokens], Any]] = {
    "int32 array": lambda t: t,
    "read-only array": lambda t: np.frombuffer(t.tobytes(), dtype=np.int32),
    "int64 array": lambda t: t.astype(np.int64),
    "uint16 array": lambda t: t.astype(np.uint16),
    "big-endian array": lambda t: t.astype(">i4"),
    "int32 tensor": torch.from_numpy,
    "int64 tensor": lambda t: torch.from_numpy(t).long(),
    "list": lambda t: t.tolist(),
    "tuple": lambda t: tuple(t.tolist()),
    "list of numpy ints": list,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_tokens_is_the_same_prompt(
    form: Callable[[Tokens], Any], cache: hetkv.Cache, prompt: Tokens, serve: Serve
) -> None:
    serve(cache, prompt).free()
    with cache.admit(form(prompt)) as seq:
        assert seq.num_computed_tokens == 96
        assert seq.num_tokens == 100
    assert cache.probe(form(prompt)).num_recoverable_tokens == 96


def test_int32_is_not_copied() -> None:
    array = np.arange(5, dtype=np.int32)
    assert as_token_ids(array) is array
    tensor = torch.arange(5, dtype=torch.int32)
    assert as_token_ids(tensor).ctypes.data == tensor.data_ptr()


REFUSED: dict[str, tuple[Any, str]] = {
    "empty list": ([], "no tokens"),
    "empty array": (np.empty(0, np.int32), "no tokens"),
    "negative int32": (np.array([1, -5], np.int32), "-5"),
    "negative int64": (np.array([1, -5]), "-5"),
    "negative in a list": ([3, -1], "-1"),
    "over 2**31 - 1": ([1, 2**31], "2147483648"),
    "over 64 bits": ([2**70], "objects"),
    "two dimensions": (np.zeros((2, 3), np.int32), "2 dimensions"),
    "no dimension": (np.array(3, np.int32), "0 dimensions"),
    "nested list": ([[1, 2], [3, 4]], "2 dimensions"),
    "ragged list": ([[1, 2], [3]], "a list"),
    "strided": (np.arange(10, dtype=np.int32)[::2], "strided"),
    "strided tensor": (torch.arange(10, dtype=torch.int32)[::2], "strided"),
    "floats": (np.array([1.0, 2.0]), "float64"),
    "bfloat16 tensor": (torch.ones(3, dtype=torch.bfloat16), "bfloat16"),
    "bools": ([True, False], "bool"),
    "a string": ("hello", "a str"),
    "None": (None, "a NoneType"),
    "a tensor elsewhere": (torch.empty(3, dtype=torch.int32, device="meta"), "a tensor on meta"),
}


@pytest.mark.parametrize(("tokens", "value"), REFUSED.values(), ids=REFUSED)
def test_bad_tokens_are_refused_by_name(tokens: Any, value: str, cache: hetkv.Cache) -> None:
    for call in (cache.probe, cache.admit, cache.pin_prefix):
        with pytest.raises(hetkv.ArgumentError) as caught:
            call(tokens)
        assert isinstance(caught.value, ValueError)
        assert caught.value.argument.startswith("tokens")
        assert value in caught.value.value
    assert cache.stats()["admissions"] == 0


def test_append_takes_one_id_or_many(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.append(7)
        seq.append(np.int64(8))
        seq.append([9, 10])
        seq.append(np.empty(0, np.int32))
        assert seq.num_tokens == 104
        for bad in (-1, 2**31, [1, -1], 1.5):
            with pytest.raises(hetkv.ArgumentError) as caught:
                seq.append(bad)  # type: ignore[arg-type]
            assert caught.value.argument.startswith("ids")
        assert seq.num_tokens == 104


# --- errors ------------------------------------------------------------------------------------------------------------------


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


# --- a request from end to end -----------------------------------------------------------------------------------------------


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


# --- rows --------------------------------------------------------------------------------------------------------------------


def test_rows_come_back(cache: hetkv.Cache, prompt: Tokens) -> None:
    assert cache.arena.dtype == torch.uint8
    assert cache.arena.data_ptr() % 256 == 0
    with cache.admit(prompt) as seq:
        seq.schedule(100)
        for group, field, rows in (("full", "v", 100), ("comp", "kv", 25), ("win", "k", 100)):
            slots = seq.slot_mapping(group, 0, rows)
            assert slots.dtype == np.int64
            g = cache.layout.group(group)
            values = torch.randn(len(g.layers), rows, *g.field(field).shape)
            cache.write_rows(group, field, slots, values)
            assert torch.equal(cache.read_rows(group, field, slots), values)
            out = torch.empty_like(values)
            assert cache.read_rows(group, field, torch.from_numpy(slots), out) is out
            assert torch.equal(out, values)
            some = cache.read_rows(group, field, slots[::-1][:3].tolist())
            assert torch.equal(some, values[:, [rows - 1, rows - 2, rows - 3]])
            assert cache.read_rows(group, field, []).shape == (len(g.layers), 0, *g.field(field).shape)
            frozen = slots.copy()
            frozen.flags.writeable = False
            assert torch.equal(cache.read_rows(group, field, frozen), values)


def test_slots_and_tables_agree(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.schedule(100)
        for group, rows_per_block in (("full", 16), ("comp", 4), ("win", 16)):
            table = seq.block_table(group)
            assert table.dtype == np.int32
            rows = np.arange(3 * rows_per_block)
            expected = table[rows // rows_per_block].astype(np.int64) * rows_per_block + rows % rows_per_block
            np.testing.assert_array_equal(seq.slot_mapping(group, 0, len(rows)), expected)
        full = seq.block_table("full")
        full[:] = -1  # a copy: the sequence's own table is untouched
        assert (seq.block_table("full") > 0).all()
        np.testing.assert_array_equal(seq.token_slots("full", 10, 40), seq.slot_mapping("full", 10, 40))
        comp = seq.token_slots("comp", 0, 16)
        np.testing.assert_array_equal(comp[3::4], seq.slot_mapping("comp", 0, 4))
        assert (np.delete(comp, [3, 7, 11, 15]) == cache.scratch_block("comp") * 4).all()
        for group, begin, end in (("full", 0, 1000), ("full", -1, 3), ("full", 5, 4), ("full", 0, 2**60), ("state", 0, 1)):
            with pytest.raises(hetkv.ArgumentError, match="range"):
                seq.slot_mapping(group, begin, end)
        with pytest.raises(hetkv.ArgumentError, match="scheduled"):
            seq.token_slots("full", 0, 101)
        for bad in ("nothing", 17, -1):
            with pytest.raises(hetkv.ArgumentError, match="group"):
                seq.block_table(bad)
        assert len(seq.block_table(0)) == 7


def test_point_blocks_come_back(cache: hetkv.Cache, prompt: Tokens) -> None:
    state, overlap = torch.randn(1, 1, 3), torch.randn(1, 4, 4)
    with cache.admit(prompt) as seq:
        seq.settle(seq.schedule(96))
        staged = seq.stage_point(96)
        cache.write_block("state", "s", staged["state"], state)
        cache.write_block("tail", "overlap_kv", staged["tail"], overlap)
        cache.write_block("tail", "kv", staged["tail"], torch.empty(1, 0, 4))
        seq.commit_point(96, dict.fromkeys(staged, 96))
        assert seq.point_block("state") is None
    with cache.admit(prompt) as seq:
        assert seq.num_computed_tokens == 96
        where = seq.point_block("state")
        assert where is not None
        assert torch.equal(cache.read_block("state", "s", where), state)
        tail = seq.point_block("tail")
        assert tail is not None
        assert torch.equal(cache.read_block("tail", "overlap_kv", tail), overlap)
        assert torch.equal(cache.read_block("tail", "overlap_kv", tail, rows=2), overlap[:, :2])
        assert seq.point_block("full") is None
        assert seq.live_block("state") is None


def test_live_state_has_blocks_of_its_own(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt, live_state=True) as seq:
        assert seq.live_block("state") is not None
        ring = seq.live_block("tail")
        assert ring is not None
        seq.schedule(20)
        rows = cache.layout.group("tail").ring_entries
        np.testing.assert_array_equal(seq.token_slots("tail", 0, 20), ring * rows + np.arange(20) % rows)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("rows.shape", lambda c: c.write_rows("full", "k", [0, 1], torch.zeros(2, 3, 2, 4))),
        ("rows.dtype", lambda c: c.write_rows("full", "k", [0], torch.zeros(2, 1, 2, 4, dtype=torch.float64))),
        ("rows.device", lambda c: c.write_rows("full", "k", [0], torch.zeros(2, 1, 2, 4, device="meta"))),
        ("out.shape", lambda c: c.read_rows("full", "k", [0], torch.zeros(1, 1, 2, 4))),
        ("slots.ndim", lambda c: c.read_rows("full", "k", [[0]])),
        ("slots.dtype", lambda c: c.read_rows("full", "k", [0.5])),
        ("group", lambda c: c.read_rows("nothing", "k", [0])),
        ("field", lambda c: c.read_rows("full", "nothing", [0])),
        ("rows", lambda c: c.read_block("state", "s", 0, rows=2)),
        ("rows", lambda c: c.write_block("state", "s", 0, torch.zeros(1, 2, 3))),
        ("rows.ndim", lambda c: c.write_block("state", "s", 0, torch.zeros(3))),
    ],
)
def test_bad_rows_are_refused_by_name(argument: str, call: Callable[[hetkv.Cache], object], cache: hetkv.Cache) -> None:
    before = cache.arena.clone()
    with pytest.raises(hetkv.ArgumentError) as caught:
        call(cache)
    assert caught.value.argument == argument
    assert torch.equal(cache.arena, before)


def test_slots_outside_the_arena_are_refused(cache: hetkv.Cache) -> None:
    for slot in (-1, 2**40):
        with pytest.raises(ValueError, match="slot"):
            cache.read_rows("full", "k", [slot])


# --- batches -----------------------------------------------------------------------------------------------------------------


def test_prepare_step_fills_what_the_single_calls_say(cache: hetkv.Cache, prompt: Tokens) -> None:
    first, second = cache.admit(prompt, live_state=True), cache.admit(prompt[:40])
    second.settle(second.schedule(16))
    buffers = hetkv.StepBuffers(cache, max_sequences=4, max_tokens=64, max_sequence_tokens=128)
    addresses = [buffers.block_tables[g].data_ptr() for g in buffers.block_tables]
    for table in (*buffers.block_tables.values(), *buffers.slots.values()):
        table.fill_(-7)
    stamps = cache.prepare_step([first, second], [32, 7], buffers)
    assert [(s.begin, s.end) for s in stamps] == [(0, 32), (16, 23)]
    assert buffers.cu_seqlens_q.tolist() == [0, 32, 39, 39, 39]
    assert buffers.seqused_k.tolist() == [32, 23, 0, 0]
    assert addresses == [buffers.block_tables[g].data_ptr() for g in buffers.block_tables]
    assert {name: tuple(t.shape) for name, t in buffers.block_tables.items()} == {
        "full": (4, 8), "comp": (4, 8), "win": (4, 8), "tail": (4, 1), "state": (4, 1),
    }  # fmt: skip
    for group in ("full", "comp", "win"):
        scratch = cache.scratch_block(group)
        entries = cache.layout.group(group).entries_per_block
        table, slots = buffers.block_tables[group], buffers.slots[group]
        for row, seq in enumerate((first, second)):
            own = seq.block_table(group)
            np.testing.assert_array_equal(table[row, : len(own)].numpy(), own)
            assert (table[row, len(own) :] == scratch).all()
        assert (table[2:] == scratch).all()
        np.testing.assert_array_equal(slots[:32].numpy(), first.token_slots(group, 0, 32))
        np.testing.assert_array_equal(slots[32:39].numpy(), second.token_slots(group, 16, 23))
        assert (slots[39:] == scratch * entries).all()
    assert buffers.block_tables["state"][0, 0] == first.live_block("state")
    assert buffers.block_tables["state"][1, 0] == cache.scratch_block("state")
    assert all(seq.settle(stamp) for seq, stamp in zip((first, second), stamps, strict=True))
    first.free()
    second.free()
    cache.check_invariants()


def test_prepare_step_pads_only_what_was_asked(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        buffers = hetkv.StepBuffers(cache, 4, 64, 128)
        buffers.block_tables["full"].fill_(-7)
        buffers.slots["full"].fill_(-7)
        cache.prepare_step([seq], [5], buffers, padded_sequences=2, padded_tokens=8)
        scratch = cache.scratch_block("full")
        assert (buffers.block_tables["full"][1] == scratch).all()
        assert (buffers.block_tables["full"][2:] == -7).all()
        assert (buffers.slots["full"][5:8] == scratch * 16).all()
        assert (buffers.slots["full"][8:] == -7).all()
        assert buffers.cu_seqlens_q[:3].tolist() == [0, 5, 5]


def test_prepare_step_is_all_or_none(hybrid_layout: hetkv.CacheLayout) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", caps={"full_kv": "40KiB"}, retention="none")
    small, grows = cache.admit(np.arange(32, dtype=np.int32)), cache.admit(np.arange(32, dtype=np.int32))
    for seq in (small, grows):
        seq.append(np.arange(300, dtype=np.int32))
    buffers = hetkv.StepBuffers(cache, 2, 512, 512)
    before = {name: table.clone() for name, table in buffers.block_tables.items()}
    with pytest.raises(hetkv.AdmissionError, match="prepare_step") as caught:
        cache.prepare_step([small, grows], [32, 300], buffers)
    assert caught.value.kind == "full_kv"
    assert small.scheduled == grows.scheduled == 0
    assert all(torch.equal(before[name], table) for name, table in buffers.block_tables.items())
    cache.prepare_step([small, grows], [32, 32], buffers)
    small.free()
    grows.free()


def test_prepare_step_refuses_wrong_batches(cache: hetkv.Cache, hybrid_layout: hetkv.CacheLayout, prompt: Tokens) -> None:
    other = hetkv.Cache(hybrid_layout, "1MiB")
    buffers = hetkv.StepBuffers(cache, 2, 64, 128)
    with cache.admit(prompt) as seq, cache.admit(prompt) as third, other.admit(prompt) as foreign:
        cases: list[tuple[str, list[hetkv.Sequence], list[int], dict[str, int]]] = [
            ("sequence twice", [seq, seq], [1, 1], {}),
            ("another cache", [foreign], [1], {}),
            ("num_tokens", [seq], [1, 2], {}),
            ("num_tokens", [seq], [-1], {}),
            ("upto", [seq], [101], {}),
            ("padded_tokens", [seq], [65], {}),
            ("padded_tokens", [seq], [1], {"padded_tokens": 65}),
            ("padded_sequences", [seq], [1], {"padded_sequences": 3}),
            ("padded_sequences", [seq, third], [1, 1], {"padded_sequences": 1}),
        ]
        for message, sequences, tokens, padding in cases:
            with pytest.raises(hetkv.ArgumentError, match=message):
                cache.prepare_step(sequences, tokens, buffers, **padding)  # type: ignore[arg-type]
        narrow = hetkv.StepBuffers(cache, 2, 64, 32)
        with pytest.raises(hetkv.ArgumentError, match="stride"):
            cache.prepare_step([seq], [40], narrow)
        assert seq.scheduled == 0
        cache.prepare_step([seq], [1], buffers)  # none of the refusals left it busy
    with pytest.raises(hetkv.ArgumentError, match="max_tokens"):
        hetkv.StepBuffers(cache, 1, 0, 10)


# --- identity ----------------------------------------------------------------------------------------------------------------


def test_namespaces_do_not_share(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    salt, adapter = cache.namespace(salt="x"), cache.namespace(adapter="x")
    assert salt == cache.namespace(salt="x") != adapter
    assert len({salt, adapter, cache.namespace(salt="x")}) == 2
    assert cache.namespace() == cache.namespace(salt="", adapter="", digests=["", b""])
    assert cache.namespace(digests=["a", "b"]) != cache.namespace(digests=["b", "a"]) != cache.namespace(digests=["ab"])
    assert cache.namespace(adapter="a", digests=[b"\x00\xff"]).fields == (("adapter", b"a"), ("digest:0", b"\x00\xff"))
    serve(cache, prompt, namespace=salt).free()
    assert cache.probe(prompt, salt).num_recoverable_tokens == 96
    assert cache.probe(prompt, adapter).num_hash_hit_tokens == 0
    assert cache.probe(prompt).num_hash_hit_tokens == 0
    assert salt.used_bytes > 0 == adapter.used_bytes
    assert cache.clear(salt) == 6
    assert cache.probe(prompt, salt).num_hash_hit_tokens == 0
    assert salt.used_bytes == 0


def test_a_namespace_of_another_cache_is_refused(cache: hetkv.Cache, hybrid_layout: hetkv.CacheLayout, prompt: Tokens) -> None:
    foreign = hetkv.Cache(hybrid_layout, "1MiB").namespace(salt="x")
    calls: list[Callable[[], object]] = [
        lambda: cache.probe(prompt, foreign),
        lambda: cache.admit(prompt, foreign),
        lambda: cache.pin_prefix(prompt, foreign),
        lambda: cache.clear(foreign),
        lambda: cache.set_quota(foreign, 1000),
        lambda: cache.evict_object(prompt, 16, "full", foreign),
        lambda: cache.quarantine(prompt, 16, "full", "checksum", foreign),
    ]
    for call in calls:
        with pytest.raises(hetkv.ArgumentError) as caught:
            call()
        assert caught.value.argument == "namespace"


def test_versions_change_the_reason(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    assert cache.model_version == "0"
    cache.set_model_version("w1")
    assert cache.probe(prompt).lost("model_version") == 96
    cache.set_model_version("0")
    assert cache.probe(prompt).num_recoverable_tokens == 96
    cache.set_abi("window_attention", 2)
    assert cache.abi == {"window_attention": 2}
    assert cache.probe(prompt).lost(hetkv.LossReason.ABI) == 96
    serve(cache, prompt).free()
    cache.declare_alignment("window_attention", 64)
    assert cache.probe(prompt).lost("layout") == 96


# --- memory ------------------------------------------------------------------------------------------------------------------


def test_evict_and_quarantine(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    assert not cache.evict_object(prompt, 16, "full")  # its children depend on it
    assert cache.evict_object(prompt, 96, "state")
    assert cache.probe(prompt).losses[1:] == (hetkv.Loss(hetkv.LossReason.SNAPSHOT_EVICTED, "state", 16),)
    assert cache.evict("recurrent_state", 3) == 3
    assert cache.evict(hetkv.ObjectKind.recurrent_state, 10) == 2
    assert cache.evict("full_kv") == 1
    assert cache.probe(prompt).num_history_tokens == 80
    with cache.admit(prompt) as seq:
        assert seq.ok
        assert cache.quarantine(prompt, 32, "comp", hetkv.LossReason.CHECKSUM) >= 4
        report = cache.probe(prompt)
        assert report.num_history_tokens == 16
        assert hetkv.Loss(hetkv.LossReason.CHECKSUM, "comp", 64) in report.losses
    for call in (
        lambda: cache.evict("nothing"),
        lambda: cache.evict("full_kv", -1),
        lambda: cache.evict_object(prompt, 17, "full"),
        lambda: cache.evict_object(prompt, 16, "nothing"),
        lambda: cache.quarantine(prompt, 16, "full", "bad luck"),
    ):
        with pytest.raises(hetkv.ArgumentError):
            call()


def test_ok_turns_false_under_a_quarantine(cache: hetkv.Cache, prompt: Tokens, serve: Serve) -> None:
    serve(cache, prompt).free()
    with cache.admit(prompt) as seq:
        assert seq.num_computed_tokens == 96
        assert seq.ok
        cache.quarantine(prompt, 96, "full")
        assert not seq.ok


def test_pinned_prefixes_stay(hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", pin_prefix_cap="20KiB")
    serve(cache, prompt).free()
    with cache.pin_prefix(prompt[:96]) as pinned:
        assert pinned.num_tokens == 96
        assert 0 < pinned.bytes <= 20 * 1024
        with pytest.raises(hetkv.AdmissionError) as caught:
            cache.pin_prefix(prompt)
        assert (caught.value.kind, caught.value.cap) == ("pin_prefix", 20 * 1024)
        assert cache.evict("full_kv", 10) == 0
    pinned.release()
    assert cache.evict("full_kv", 10) == 6


def test_stats_count_hits_and_recoverable_tokens_apart(hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", floors={"swa_window": 2}, caps={"full_kv": "512KiB"})
    idle = cache.stats()["kinds"]["full_kv"]["used_bytes"]  # the scratch block
    serve(cache, prompt).free()
    cache.evict_object(prompt, 96, "win")
    cache.admit(prompt).free(turn_end=False)
    stats = cache.stats()
    assert (stats["prompt_tokens"], stats["hash_hit_tokens"], stats["recoverable_tokens"]) == (200, 96, 80)
    assert {reason: n for reason, n in stats["losses"].items() if n} == {"granularity": 8, "not_found": 96, "window_evicted": 16}
    assert stats["evictions"] == {
        "full_kv": 0, "compressed_kv": 0, "swa_window": 1, "uncompressed_tail": 0, "recurrent_state": 0,
    }  # fmt: skip
    assert stats["kinds"]["full_kv"] == {"used_bytes": idle + 6 * 2048, "cap_bytes": 512 * 1024, "floor_bytes": 0}
    assert stats["kinds"]["swa_window"]["floor_bytes"] == 2 * stats["slab_bytes"]
    assert stats["pools"]["full"]["block_bytes"] == 2048
    assert stats["published_nodes"] == stats["live_nodes"] == 6
    assert stats["published_points"] == {"win": 6, "tail": 6, "state": 6}
    assert stats["arena_bytes"] == cache.arena.numel()
    assert stats["metadata_bytes"] > 0 <= stats["stranded_bytes"]
    assert stats["admissions"] == 2


def test_bytes_for_is_what_admission_takes(cache: hetkv.Cache) -> None:
    before = sum(kind["used_bytes"] for kind in cache.stats()["kinds"].values())
    with cache.admit(np.zeros(100, np.int32), chunk_tokens=32):
        used = sum(kind["used_bytes"] for kind in cache.stats()["kinds"].values())
        assert used - before == cache.bytes_for(100, 32)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("capacity", {"capacity": "many"}),
        ("capacity", {"capacity": 0}),
        ("capacity", {"capacity": 1.5}),
        ("verify_tokens", {"verify_tokens": "some"}),
        ("secret", {"secret": 0}),
        ("secret", {"secret": 2**64}),
        ("retention", {"retention": "every(0)"}),
        ("kind", {"caps": {"nothing": 5}}),
        ("kind", {"floors": {"nothing": 5}}),
        ("floors['full_kv']", {"floors": {"full_kv": -1}}),
        ("caps['full_kv']", {"caps": {"full_kv": "5 apples"}}),
        ("max_nodes", {"max_nodes": -1}),
        ("slab_bytes", {"slab_bytes": 100}),
    ],
)
def test_bad_options_are_refused_by_name(argument: str, options: dict[str, Any], hybrid_layout: hetkv.CacheLayout) -> None:
    with pytest.raises(hetkv.ArgumentError) as caught:
        hetkv.Cache(hybrid_layout, **({"capacity": "1MiB"} | options))
    assert caught.value.argument == argument


def test_an_arena_that_is_too_small_is_refused(hybrid_layout: hetkv.CacheLayout) -> None:
    with pytest.raises(hetkv.HetkvError):
        hetkv.Cache(hybrid_layout, 4096)
    with pytest.raises(hetkv.AdmissionError) as caught:
        hetkv.Cache(hybrid_layout, "64KiB", slab_bytes="4KiB", floors={"full_kv": 17})
    assert not caught.value.retryable


@pytest.mark.parametrize("options", [{"lock_free": False}, {"verify_tokens": "deepest"}, {"max_nodes": 100}, {"secret": None}])
def test_options_keep_the_promises(
    options: dict[str, Any], hybrid_layout: hetkv.CacheLayout, prompt: Tokens, serve: Serve
) -> None:
    cache = hetkv.Cache(hybrid_layout, "1MiB", retention="all", **options)
    serve(cache, prompt).free()
    assert cache.probe(prompt).num_recoverable_tokens == 96


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (5, 5),
        ("5B", 5),
        ("1KiB", 1024),
        ("1.5 MiB", 1572864),
        ("2GB", 2 * 10**9),
        (" 1 TiB ", 2**40),
        ("3kB", None),
        ("-1B", None),
    ],
)
def test_sizes(text: int | str, size: int | None) -> None:
    if size is not None:
        assert byte_size(text, "size") == size
    else:
        with pytest.raises(hetkv.ArgumentError, match="size"):
            byte_size(text, "size")


# --- threads -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_prompt(plain_layout: hetkv.CacheLayout) -> tuple[hetkv.Cache, Tokens]:
    return hetkv.Cache(plain_layout, "16MiB"), np.zeros(4_000_000, np.int32)


def test_two_threads_in_one_sequence_get_an_error(long_prompt: tuple[hetkv.Cache, Tokens]) -> None:
    cache, tokens = long_prompt
    seq = cache.admit(tokens[:1000])
    seq.append(tokens)
    stop, refused = threading.Event(), []

    def hash_again() -> None:
        while not stop.is_set():
            try:
                seq.hashed_prefix()  # some milliseconds without the GIL
            except RuntimeError as error:
                refused.append(str(error))

    worker = threading.Thread(target=hash_again)
    worker.start()
    deadline = time.monotonic() + 15
    try:
        while not refused and time.monotonic() < deadline:
            try:
                assert seq.num_tokens == 4_001_000
            except RuntimeError as error:
                refused.append(str(error))
    finally:
        stop.set()
        worker.join()
    assert refused[0] == "sequence used from two threads at once"
    assert seq.num_tokens == 4_001_000  # and it is not left busy
    seq.free()


def test_the_gil_is_free_while_a_long_prompt_is_probed(long_prompt: tuple[hetkv.Cache, Tokens]) -> None:
    cache, tokens = long_prompt
    inside = done = False

    def probe() -> None:
        nonlocal inside, done
        for _ in range(20):
            inside = True
            cache.probe(tokens)
            inside = False
        done = True

    worker = threading.Thread(target=probe)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10)  # this thread runs only when the other gives the GIL up by itself
    turns = 0
    try:
        worker.start()
        while not done:
            turns += inside
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        worker.join()
    assert turns > 10  # 0 or 1 if the GIL is kept


def test_many_threads_on_their_own_sequences(hybrid_layout: hetkv.CacheLayout, serve: Serve) -> None:
    cache = hetkv.Cache(hybrid_layout, "2MiB", retention="all")
    shared = np.arange(64, dtype=np.int32)
    failures: list[BaseException] = []

    def requests(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                tokens = np.concatenate([shared, rng.integers(0, 5, 64, dtype=np.int32)])
                seq = serve(cache, tokens)
                assert seq.published_tokens >= seq.num_computed_tokens
                seq.free()
                report = cache.probe(tokens)
                assert report.num_recoverable_tokens + sum(loss.tokens for loss in report.losses) == 128
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=requests, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.probe(np.append(shared, 1)).num_recoverable_tokens == 64
    cache.check_invariants()
    assert all(pool["blocks_live"] == pool["blocks_reserved"] for pool in cache.stats()["pools"].values())


# --- the documented surface --------------------------------------------------------------------------------------------------


def test_the_documented_surface_is_there(cache: hetkv.Cache, prompt: Tokens) -> None:
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    block = re.search(r"## 2\. Public Python surface\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    with cache.admit(prompt) as seq:
        owners: dict[str, Any] = {"cache": cache, "seq": seq, "hetkv": hetkv, "CacheLayout": hetkv.CacheLayout}
        names = re.findall(r"\b(cache|seq|hetkv|CacheLayout)\.(\w+)", block[1])
        assert len(names) > 30
        for owner, name in names:
            assert hasattr(owners[owner], name), f"{owner}.{name}"
        calls = re.findall(r"\b(cache|seq)\.(\w+)\(([^)]*)\)", block[1])
        for owner, name, arguments in calls:
            parameters = inspect.signature(getattr(owners[owner], name)).parameters
            for keyword in re.findall(r"(\w+)=", arguments):
                assert keyword in parameters, f"{owner}.{name}({keyword}=)"


def test_what_owns_memory_is_not_pickled(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        for owner in (cache, seq):
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(owner)
    report = cache.probe(prompt)
    assert pickle.loads(pickle.dumps(report)) == report
