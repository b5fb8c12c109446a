"""Hypothesis state machines over the whole Python surface.

Roomy: an arena in which nothing is ever evicted unasked, so that a plain Python model (tests/python/model) predicts every
report, every return value and every count exactly. Tight: an arena under constant pressure, where reports must add up, restored
bytes must be right, limits must hold and refusals must leave no trace.

HETKV_STATE_MACHINE_EXAMPLES=200 runs more, and not the same ones each time.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import invariant, precondition, rule

import hetkv
from model.plain_layout import PlainGroup, PlainLayout
from model.reference_cache import Report, Version
from request_machine import BLOCK, SPACES, RequestMachine, as_plain, picks, prompts, rarely, spaces, token

MODELS = ("w0", "w1")
ALIGNMENTS = (64, 256)

FULL = PlainLayout("full", BLOCK, (PlainGroup("full", "full_kv", "history"),))
WINDOW = PlainLayout(
    "full+windows",
    BLOCK,
    (
        PlainGroup("full", "full_kv", "history"),
        PlainGroup("near", "swa_window", "window", window=20),
        PlainGroup("far", "swa_window", "window", window=50),
    ),
)
V4 = PlainLayout(
    "v4",
    BLOCK,
    (
        PlainGroup("swa", "swa_window", "window", window=24),
        PlainGroup("csa", "compressed_kv", "history", ratio=4),
        PlainGroup("csa_index", "indexer_state", "history", ratio=4, indexes="csa"),
        PlainGroup("hca", "compressed_kv", "history", ratio=32),
        PlainGroup("csa_tail", "uncompressed_tail", "tail", ratio=4, overlap_rows=4),
        PlainGroup("hca_tail", "uncompressed_tail", "tail", ratio=32),
    ),
)
SNAPSHOT = PlainLayout(
    "snapshot",
    BLOCK,
    (PlainGroup("full", "full_kv", "history"), PlainGroup("state", "recurrent_state", "snapshot")),
)

torch.set_num_threads(1)

EXAMPLES = os.environ.get("HETKV_STATE_MACHINE_EXAMPLES")
SETTINGS = settings(
    **({"phases": (Phase.explicit, Phase.generate)} if os.environ.get("HETKV_NO_SHRINK") else {}),
    max_examples=int(EXAMPLES or 25),
    stateful_step_count=50,
    deadline=None,
    derandomize=EXAMPLES is None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


class CacheMachine(RequestMachine):
    """What happens to a cache beside its requests, and what holds after every step."""

    # Each of these wipes out much of what was built up, so most of the time it does nothing.

    @rule(name=st.sampled_from(MODELS), go=rarely)
    def other_weights(self, name: str, go: bool) -> None:
        if not go:
            return
        self.cache.set_model_version(name)
        self.switch(self.version._replace(model=name))

    @rule(value=st.sampled_from([1, 2]), go=rarely)
    def other_kernels(self, value: int, go: bool) -> None:
        if not go:
            return
        self.cache.set_abi("attention", value)
        self.switch(self.version._replace(abi=value))

    @rule(alignment=st.sampled_from(ALIGNMENTS), go=rarely)
    def other_alignment(self, alignment: int, go: bool) -> None:
        if not go:
            return
        self.cache.declare_alignment("attention", alignment)
        self.switch(self.version._replace(layout=alignment))

    def switch(self, version: Version) -> None:
        self.version = self.model.version = version

    @rule(kind=st.integers(0, 10), go=rarely)
    def evict_all(self, kind: int, go: bool) -> None:
        if not go:
            return
        kinds = sorted({g.kind for g in self.plain.groups})
        name = kinds[kind % len(kinds)]
        gone = self.cache.evict(name, 1_000_000)
        if self.exact:
            assert gone == self.model.evict_all(name)
        assert self.cache.evict(name, 1_000_000) == 0

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 50), depth=st.integers(1, 6), group=st.integers(0, 10))
    def evict_object(self, which: int, depth: int, group: int) -> None:
        prompt, space = self.seen[which % len(self.seen)]
        depth = min(depth, len(prompt) // BLOCK)
        if depth == 0:
            return
        chosen = self.plain.groups[group % len(self.plain.groups)]
        gone = self.cache.evict_object(list(prompt), depth * BLOCK, chosen.name, self.spaces[space])
        if self.exact:
            assert gone == self.model.evict_object(prompt, depth * BLOCK, chosen, space)
        assert not (gone and self.cache.evict_object(list(prompt), depth * BLOCK, chosen.name, self.spaces[space]))

    @precondition(lambda self: self.seen)
    @rule(
        which=st.integers(0, 50),
        depth=st.integers(1, 6),
        group=st.integers(0, 10),
        reason=st.sampled_from(["checksum", "incomplete"]),
    )
    def quarantine(self, which: int, depth: int, group: int, reason: str) -> None:
        prompt, space = self.seen[which % len(self.seen)]
        depth = min(depth, len(prompt) // BLOCK)
        if depth == 0:
            return
        chosen = self.plain.groups[group % len(self.plain.groups)]
        marked = self.cache.quarantine(list(prompt), depth * BLOCK, chosen.name, reason, self.spaces[space])
        if self.exact:
            assert marked == self.model.quarantine(prompt, depth * BLOCK, chosen, reason, space)

    @rule(space=st.sampled_from(SPACES), go=rarely)
    def clear(self, space: str, go: bool) -> None:
        if not go:
            return
        gone = self.cache.clear(self.spaces[space])
        self.lives[space] += 1
        if self.exact:
            assert gone == self.model.clear(space)

    @precondition(lambda self: self.seen and len(self.pins) < 3)
    @rule(which=st.integers(0, 50))
    def pin_prefix(self, which: int) -> None:
        prompt, space = self.seen[which % len(self.seen)]
        pinned = self.attempt(lambda: self.cache.pin_prefix(list(prompt), self.spaces[space]))
        if pinned is None:
            return
        model = self.model.pin_prefix(prompt, space) if self.exact else None
        if model is not None:
            assert pinned.num_tokens == model.tokens
            assert (pinned.bytes > 0) == (model.tokens > 0)
        report = self.cache.probe([*prompt, token(3, 0)], self.spaces[space])
        assert report.num_recoverable_tokens >= pinned.num_tokens
        self.pins.append((pinned, model))

    @precondition(lambda self: self.pins)
    @rule(number=picks)
    def release(self, number: int) -> None:
        pinned, model = self.pins.pop(number % len(self.pins))
        pinned.release()
        pinned.release()
        if model is not None:
            model.release()

    # --- always ---

    @invariant()
    def bytes_are_right(self) -> None:
        """Every running sequence still finds its own rows, whatever was evicted, published, cleared or broken beside it."""
        for one in self.live:
            one.writer.check_rows(self.cache, one.real, one.real.settled, min(one.real.settled, one.foreign_from))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check_invariants()
        for one in list(self.live):
            self.free_one(one, turn_end=True)
        for pinned, _ in self.pins:
            pinned.release()
        for space in self.spaces.values():
            self.cache.clear(space)
        for kind in sorted({g.kind for g in self.plain.groups}):
            self.cache.evict(kind, 1_000_000)
        self.cache.check_invariants()
        stats = self.cache.stats()
        assert stats["live_nodes"] == 0
        for name, pool in stats["pools"].items():
            assert (pool["blocks_live"], pool["blocks_reserved"]) == (1, 1), f"pool {name}: only its scratch block stays"
        assert all(space.used_bytes == 0 for space in self.spaces.values())


class RoomyMachine(CacheMachine):
    """Nothing goes unasked: the model knows everything."""

    @rule(kind=st.integers(0, 10))
    def evict_one(self, kind: int) -> None:
        """The cache may choose which; but exactly one object went, and nothing else changed."""
        kinds = sorted({g.kind for g in self.plain.groups})
        name = kinds[kind % len(kinds)]
        candidates = self.model.candidates(name)
        assert self.cache.evict(name, 1) == min(1, len(candidates))
        if not candidates:
            return
        spaces = {life: space for space, life in self.model.lives.items()}
        visible = [
            ([*prefix, token(3, 0)], spaces[life])
            for version, life, prefix in self.model.index
            if version == self.version and life in spaces
        ]
        told = [outcome(self.cache.probe(prompt, self.spaces[space])) for prompt, space in visible]
        explained = []
        for node, group in candidates:
            with self.model.without(node, group):
                if told == [outcome(self.model.probe(tuple(prompt), space)) for prompt, space in visible]:
                    explained.append((node, group))
        assert explained, "no single eviction explains what the cache reports now"
        if len(explained) == 1:
            self.model.evict_one(*explained[0])
        else:  # nobody can tell yet: take all, so that both agree again
            assert self.cache.evict(name, 1_000_000) == self.model.evict_all(name) - 1

    @rule(prompt=prompts, space=spaces)
    def over_the_whole_quota(self, prompt: tuple[int, ...], space: str) -> None:
        """What can never fit into the quota is refused before anything is touched: the model hears nothing of it."""
        self.cache.set_quota(self.spaces[space], 1)
        before = self.cache.stats()
        with pytest.raises(hetkv.AdmissionError) as refused:
            self.cache.admit(list(prompt), self.spaces[space])
        assert (refused.value.kind, refused.value.cap, refused.value.retryable) == ("namespace", 1, False)
        assert {**before, "refusals": 0} == {**self.cache.stats(), "refusals": 0}
        self.cache.set_quota(self.spaces[space], None)

    @invariant()
    def counts_agree(self) -> None:
        stats = self.cache.stats()
        assert stats["live_nodes"] == len(self.model.nodes)
        assert stats["published_nodes"] == self.model.published_nodes
        assert stats["found_equal"] == self.model.found_equal
        assert {name: stats[name] for name in self.model.totals} == self.model.totals
        lost = dict(stats["losses"])
        expected = dict(self.model.lost_tokens)
        for losses in (lost, expected):
            losses["not_found"] = losses.get("not_found", 0) + losses.pop("evicted", 0)
        assert {reason: tokens for reason, tokens in lost.items() if tokens} == {r: t for r, t in expected.items() if t}
        for group in self.plain.groups:
            if group.retention == "window" and self.live:
                continue
            extra = sum(group.retention == "snapshot" and one.live_state for one in self.live)
            assert stats["pools"][group.name]["blocks_live"] == 1 + self.model.live_blocks(group) + extra, group.name
        for one in self.live:
            assert one.model is not None
            assert (one.real.scheduled, one.real.settled) == (one.model.scheduled, one.model.settled)
            assert one.real.ok == one.model.pin.ok


def outcome(report: hetkv.HitReport | Report) -> Report:
    """A report without the difference between evicted and never seen."""
    plain = as_plain(report) if isinstance(report, hetkv.HitReport) else report
    return plain._replace(losses=tuple(x._replace(reason="not_found") if x.reason == "evicted" else x for x in plain.losses))


class TightMachine(CacheMachine):
    """Every few steps something has to go."""

    exact = False

    def __init__(self) -> None:
        super().__init__()
        self.quotas: dict[str, int | None] = dict.fromkeys(SPACES)

    def limits(self) -> dict[str, Any]:
        caps = {"swa_window": "8KiB"} if any(g.kind == "swa_window" for g in self.plain.groups) else {}
        return {"slab_bytes": "1KiB", "caps": caps, "pin_prefix_cap": "6KiB"}

    def attempt(self, action: Any) -> Any:
        before, used = self.cache.stats(), {name: space.used_bytes for name, space in self.spaces.items()}
        refused = None
        try:
            result = action()
        except hetkv.AdmissionError as error:
            refused = error
        if refused is not None:
            after = self.cache.stats()
            assert refused.need > 0
            changed = {"refusals"}
            if refused.retryable:  # it looked for room, so others' idle objects may have gone; nothing else
                changed |= {"evictions", "live_nodes", "pools", "kinds", "free_slabs", "slabs_reclaimed", "stranded_bytes"}
                changed |= {"metadata_bytes"}
            assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}
            for name, pool in after["pools"].items():
                assert pool["blocks_live"] <= before["pools"][name]["blocks_live"]
                assert pool["blocks_reserved"] <= before["pools"][name]["blocks_reserved"]
            assert all(space.used_bytes <= used[name] for name, space in self.spaces.items())
            return None
        for name, space in self.spaces.items():
            quota = self.quotas[name]
            assert quota is None or space.used_bytes <= max(quota, used[name])
        return result

    @rule(space=st.sampled_from(SPACES), quota=st.sampled_from([None, None, 2048, 6000, 12000]))
    def set_quota(self, space: str, quota: int | None) -> None:
        self.cache.set_quota(self.spaces[space], quota)
        self.quotas[space] = quota

    @rule(kind=st.integers(0, 10), blocks=st.integers(1, 3))
    def evict_some(self, kind: int, blocks: int) -> None:
        kinds = sorted({g.kind for g in self.plain.groups})
        assert 0 <= self.cache.evict(kinds[kind % len(kinds)], blocks) <= blocks

    @invariant()
    def limits_hold(self) -> None:
        stats = self.cache.stats()
        for kind in stats["kinds"].values():
            assert kind["cap_bytes"] is None or kind["used_bytes"] <= kind["cap_bytes"]
        assert sum(kind["used_bytes"] for kind in stats["kinds"].values()) <= stats["arena_bytes"]
        for pool in stats["pools"].values():
            assert 1 <= pool["blocks_live"] <= pool["blocks_reserved"] <= pool["slabs_owned"] * pool["blocks_per_slab"]
        assert sum(pool["slabs_owned"] for pool in stats["pools"].values()) + stats["free_slabs"] == stats["slabs"]
        assert stats["recoverable_tokens"] + sum(stats["losses"].values()) == stats["prompt_tokens"]


def machine(base: type[CacheMachine], layout: PlainLayout, capacity: str) -> Any:
    made = type(f"{base.__name__}_{layout.name}", (base,), {"plain": layout, "capacity": capacity})
    case = made.TestCase
    case.settings = SETTINGS
    return case


TestRoomyFull = machine(RoomyMachine, FULL, "16MiB")
TestRoomyWindow = machine(RoomyMachine, WINDOW, "16MiB")
TestRoomyV4 = machine(RoomyMachine, V4, "16MiB")
TestRoomySnapshot = machine(RoomyMachine, SNAPSHOT, "16MiB")
TestTightFull = machine(TightMachine, FULL, "6KiB")
TestTightWindow = machine(TightMachine, WINDOW, "20KiB")
TestTightV4 = machine(TightMachine, V4, "16KiB")
TestTightSnapshot = machine(TightMachine, SNAPSHOT, "7KiB")
