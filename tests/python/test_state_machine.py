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
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import hetkv
from model.plain_layout import PlainGroup, PlainLayout
from model.reference_cache import Loss, ReferenceCache, ReferenceSequence, Report, Stamp, Version
from model.row_values import RowWriter, build_layout

BLOCK = 16
SPACES = ("", "blue")
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


def token(variant: int, position: int) -> int:
    return 100 * variant + position % BLOCK


# A prompt is a path through a tree of blocks with two variants each, so prefixes are shared and branch everywhere.
prompts = st.builds(
    lambda blocks, rest: (
        tuple(token(v, t) for i, v in enumerate(blocks) for t in range(i * BLOCK, (i + 1) * BLOCK))
        + tuple(token(2, t) for t in range(rest))
    ),
    st.lists(st.sampled_from([0, 0, 0, 1]), max_size=6),
    st.sampled_from([1, 0, 7, BLOCK - 1]),
).filter(bool)
spaces = st.sampled_from(["", "", SPACES[1]])
retentions = st.sampled_from(["all", "all", "every(32)", "turn_ends", "adaptive", "none"])
picks = st.integers(0, 5)
rarely = st.sampled_from([False, False, False, True])


class Live:
    """One running sequence of the test: the real one, what the engine writes, and the model's."""

    def __init__(
        self, real: hetkv.Sequence, tokens: tuple[int, ...], space: str, writer: RowWriter, model: ReferenceSequence | None
    ) -> None:
        self.real = real
        self.tokens = list(tokens)
        self.space = space
        self.writer = writer
        self.model = model
        self.stamps: list[tuple[hetkv.StepStamp, Stamp | None]] = []
        self.foreign_from = 1 << 60
        self.live_state = False


class CacheMachine(RuleBasedStateMachine):
    """What both machines do: requests in all their forms, and the engine's writes."""

    plain: PlainLayout = FULL
    capacity = "16MiB"
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Live] = []
        self.pins: list[tuple[hetkv.PinnedPrefix, Any]] = []
        self.seen: list[tuple[tuple[int, ...], str]] = []  # prompts that were asked for
        self.lives = dict.fromkeys(SPACES, 0)

    @initialize(retention=retentions, lock_free=st.booleans(), turns=st.lists(st.tuples(prompts, spaces), min_size=3, max_size=6))
    def start(self, retention: str, lock_free: bool, turns: list[tuple[tuple[int, ...], str]]) -> None:
        self.cache = hetkv.Cache(
            build_layout(self.plain), self.capacity, retention=retention, secret=1, model_version="w0", abi={"attention": 1},
            lock_free=lock_free, **self.limits(),
        )  # fmt: skip
        self.spaces = {"": self.cache.namespace(), "blue": self.cache.namespace(salt="blue")}
        self.version = Version(0, 1, "w0")
        self.model = ReferenceCache(self.plain, retention, self.version)
        for prompt, space in turns:
            self.turn(prompt, space)

    def limits(self) -> dict[str, Any]:
        return {"pin_prefix_cap": "8MiB", "slab_bytes": "64KiB"}

    def pick(self, number: int) -> Live:
        return self.live[number % len(self.live)]

    def groups(self, kinds: tuple[str, ...] = ("history", "window", "tail", "snapshot")) -> list[PlainGroup]:
        return [g for g in self.plain.groups if g.retention in kinds]

    def attempt(self, action: Any) -> Any:
        """The roomy machine never lacks memory; the tight one checks what a refusal leaves behind."""
        return action()

    # --- requests ---

    @rule(prompt=prompts, space=spaces, new=st.sampled_from([0, 0, 40]), chunk=st.sampled_from([None, BLOCK, 3 * BLOCK]))
    def admit(self, prompt: tuple[int, ...], space: str, new: int, chunk: int | None) -> None:
        if len(self.live) == 5:
            return
        self.begin(prompt, space, max_new_tokens=new, chunk_tokens=chunk)

    @precondition(lambda self: self.seen and len(self.live) < 5)
    @rule(which=st.integers(0, 50), cut=st.sampled_from([0, 0, 1, BLOCK, 20]), live_state=st.booleans())
    def admit_again(self, which: int, cut: int, live_state: bool) -> None:
        prompt, space = self.seen[which % len(self.seen)]
        self.begin(prompt[: max(1, len(prompt) - cut)], space, live_state=live_state)

    def begin(self, prompt: tuple[int, ...], space: str, **options: Any) -> None:
        seq = self.attempt(lambda: self.cache.admit(list(prompt), self.spaces[space], **options))
        if seq is None:
            return
        model = None
        if self.exact:
            model = self.model.admit(prompt, space)
            assert as_plain(seq.report) == as_told(model.report, seq.report)
            assert seq.report.canonical == model.canonical
        self.check_report(seq.report, len(prompt))
        assert seq.num_computed_tokens == seq.report.num_recoverable_tokens < len(prompt)
        writer = RowWriter(self.plain, (self.version, space, self.lives[space]))
        writer.extend(list(prompt))
        writer.check_resume(self.cache, seq)
        self.seen.append((prompt, space))
        self.live.append(Live(seq, prompt, space, writer, model))
        self.live[-1].live_state = bool(options.get("live_state"))

    def turn(self, prompt: tuple[int, ...], space: str, answer: int = 0, chunk: int = BLOCK) -> None:
        """A whole turn of a conversation: prompt, answer, end."""
        before = len(self.live)
        self.begin(prompt, space)
        if len(self.live) == before:
            return
        one = self.live[-1]
        self.run_one(one, chunk, stage=True, late=False)
        for t in range(answer):
            self.extend(one, [token(1, len(one.tokens) + t)])
            self.run_one(one, 1, stage=True, late=True)
        self.free_one(one, turn_end=True)

    @precondition(lambda self: len(self.live) < 5)
    @rule(prompt=prompts, space=spaces, answer=st.sampled_from([0, 1, 20]), chunk=st.sampled_from([BLOCK, BLOCK, 7, 40]))
    def new_turn(self, prompt: tuple[int, ...], space: str, answer: int, chunk: int) -> None:
        self.turn(prompt, space, answer, chunk)

    @precondition(lambda self: self.seen and len(self.live) < 5)
    @rule(which=st.integers(0, 50), extra=st.lists(st.sampled_from([0, 1]), max_size=2), answer=st.sampled_from([0, 1, 20]))
    def next_turn(self, which: int, extra: list[int], answer: int) -> None:
        """A conversation goes on from where an earlier one stood, or is asked again."""
        prompt, space = self.seen[which % len(self.seen)]
        longer = list(prompt)
        for variant in extra:
            longer += [token(variant, len(longer) + i) for i in range(BLOCK)]
        self.turn(tuple(longer[:150]), space, answer)

    def check_report(self, report: hetkv.HitReport, length: int) -> None:
        assert report.num_prompt_tokens == length
        assert sum(loss.tokens for loss in report.losses) == length - report.num_recoverable_tokens
        assert all(loss.tokens > 0 for loss in report.losses)
        full = length // BLOCK * BLOCK
        assert 0 <= report.num_recoverable_tokens <= report.num_history_tokens <= report.num_hash_hit_tokens <= full

    @precondition(lambda self: self.seen)
    @rule(which=st.integers(0, 50), extra=st.sampled_from([0, 1, BLOCK]), space=st.sampled_from([None, *SPACES]))
    def probe(self, which: int, extra: int, space: str | None) -> None:
        prompt, home = self.seen[which % len(self.seen)]
        self.probe_one(prompt + tuple(token(3, t) for t in range(extra)), home if space is None else space)

    def probe_one(self, prompt: tuple[int, ...], space: str) -> None:
        report = self.cache.probe(list(prompt), self.spaces[space])
        self.check_report(report, len(prompt))
        if self.exact:
            assert as_plain(report) == as_told(self.model.probe(prompt, space), report)

    # --- steps ---

    @precondition(lambda self: self.live)
    @rule(number=picks, count=st.integers(1, 40), variant=st.sampled_from([0, 1]))
    def append(self, number: int, count: int, variant: int) -> None:
        one = self.pick(number)
        if len(one.tokens) + count > 200:
            return
        self.extend(one, [token(variant, len(one.tokens) + i) for i in range(count)])

    def extend(self, one: Live, new: list[int]) -> None:
        one.real.append(new if len(new) > 1 else new[0])
        one.tokens += new
        one.writer.extend(one.tokens)
        if one.model is not None:
            one.model.tokens += new

    def schedule(self, one: Live, upto: int) -> bool:
        stamp = self.attempt(lambda: one.real.schedule(upto))
        if stamp is None:
            return False
        one.stamps.append((stamp, None if one.model is None else one.model.schedule(upto)))
        return True

    @precondition(lambda self: self.live)
    @rule(number=picks, count=st.sampled_from([1, 5, BLOCK, 2 * BLOCK]))
    def schedule_only(self, number: int, count: int) -> None:
        one = self.pick(number)
        self.schedule(one, min(len(one.tokens), one.real.scheduled + count))

    @precondition(lambda self: any(one.stamps for one in self.live))
    @rule(number=picks)
    def settle_next(self, number: int) -> None:
        waiting = [one for one in self.live if one.stamps]
        self.settle(waiting[number % len(waiting)])

    def settle(self, one: Live) -> None:
        stamp, plain_stamp = one.stamps.pop(0)
        if stamp.epoch == one.real.epoch:
            foreign = stamp.version != one.real.version
            one.writer.write_step(self.cache, one.real, stamp.begin, stamp.end, foreign)
            if foreign:
                one.foreign_from = min(one.foreign_from, stamp.begin)
        took = one.real.settle(stamp)
        assert took == (stamp.epoch == one.real.epoch)
        if one.model is not None:
            assert plain_stamp is not None
            assert took == one.model.settle(plain_stamp)

    @precondition(lambda self: self.live)
    @rule(number=picks)
    def restart(self, number: int) -> None:
        one = self.pick(number)
        one.real.restart_from_settled()
        if one.model is not None:
            one.model.restart()

    @precondition(lambda self: self.live)
    @rule(number=picks, ahead=st.sampled_from([0, 1, BLOCK, 200]))
    def accept(self, number: int, ahead: int) -> None:
        """Speculative decoding: only what is accepted counts."""
        one = self.pick(number)
        one.real.hold_acceptance()
        upto = min(len(one.tokens), one.real.accepted + ahead)
        one.real.accept(upto)
        if one.model is not None:
            if one.model.accepted is None:
                one.model.accepted = one.model.settled
            one.model.accept(upto)

    @precondition(lambda self: self.live)
    @rule(
        number=picks, chunk=st.sampled_from([BLOCK, BLOCK, 7, 40]), stage=st.sampled_from([True, True, False]), late=st.booleans()
    )
    def run(self, number: int, chunk: int, stage: bool, late: bool) -> None:
        """An engine at work: steps to the end of what is known, states staged at boundaries, published on the way or late."""
        self.run_one(self.pick(number), chunk, stage, late)

    def run_one(self, one: Live, chunk: int, stage: bool, late: bool) -> None:
        while one.stamps:
            self.settle(one)
        while one.real.scheduled < len(one.tokens):
            begin = one.real.scheduled
            upto = (begin // BLOCK + 1) * BLOCK if chunk == BLOCK else begin + chunk
            if not self.schedule(one, min(len(one.tokens), upto)):
                return
            self.settle(one)
            if stage and one.real.settled % BLOCK == 0 and one.real.settled > one.real.num_computed_tokens:
                self.stage(one, one.real.settled)
            if not late:
                self.publish_one(one, None)
        self.publish_one(one, None)

    # --- checkpoints ---

    def stage(self, one: Live, position: int, prove: bool = True) -> None:
        wanted = one.real.wants_point(position)
        staged = one.real.stage_point(position)
        assert wanted or not staged
        if one.model is not None:
            assert wanted == one.model.wants_point(position)
            assert set(staged) == one.model.stage(position)
        for group in self.plain.staged:
            if group.name in staged:
                one.writer.write_state(self.cache, group, staged[group.name], position, position > one.foreign_from)
        if staged and prove:
            one.real.commit_point(position, dict.fromkeys(staged, position))
            if one.model is not None:
                one.model.commit(position)

    @precondition(lambda self: self.live)
    @rule(number=picks, back=st.integers(0, 3), prove=st.sampled_from([True, True, False]), lie=st.booleans())
    def stage_somewhere(self, number: int, back: int, prove: bool, lie: bool) -> None:
        """At any boundary that was computed, late ones included; and a state of another position is never taken."""
        one = self.pick(number)
        position = (one.real.settled // BLOCK - back) * BLOCK
        if position <= one.real.num_computed_tokens:
            return
        self.stage(one, position, prove)
        if lie and (staged := one.real.stage_point(position)):
            with pytest.raises(hetkv.PositionError) as refused:
                one.real.commit_point(position, dict.fromkeys(staged, position + 1))
            assert (refused.value.claimed, refused.value.actual) == (position, position + 1)

    def publish_one(self, one: Live, upto: int | None) -> None:
        result = one.real.publish() if upto is None else one.real.publish(upto)
        assert result.published_tokens <= one.real.settled
        if one.model is not None:
            tokens, status = one.model.publish() if upto is None else one.model.publish(upto)
            assert (result.published_tokens, result.status.name) == (tokens, status)

    @precondition(lambda self: self.live)
    @rule(number=picks, upto=st.one_of(st.none(), st.integers(0, 200)))
    def publish(self, number: int, upto: int | None) -> None:
        self.publish_one(self.pick(number), upto)

    @precondition(lambda self: self.live)
    @rule(number=picks, turn_end=st.booleans())
    def free(self, number: int, turn_end: bool) -> None:
        self.free_one(self.pick(number), turn_end)

    def free_one(self, one: Live, turn_end: bool) -> None:
        self.seen.append((tuple(one.tokens), one.space))
        one.real.free(turn_end)
        one.real.free(not turn_end)  # a second one does nothing
        if one.model is not None:
            one.model.free(turn_end)
        self.live.remove(one)

    # --- what happens to a cache ---

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


def as_plain(report: hetkv.HitReport) -> Report:
    return Report(
        report.num_prompt_tokens,
        report.num_hash_hit_tokens,
        report.num_history_tokens,
        report.num_recoverable_tokens,
        tuple(Loss(str(loss.reason), loss.group, loss.tokens) for loss in report.losses),
    )


def as_told(expected: Report, told: hetkv.HitReport) -> Report:
    """The memory of what was evicted is a small table: an old entry may have made room, and is then "not found"."""
    reasons = {str(loss.reason) for loss in told.losses}
    if "not_found" not in reasons:
        return expected
    losses = tuple(loss._replace(reason="not_found") if loss.reason == "evicted" else loss for loss in expected.losses)
    return expected._replace(losses=losses)


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
