"""Rows and blocks through the Python surface: slots, tables, points, and whole batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hetkv

Tokens = npt.NDArray[np.int32]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


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
