"""What the state machines have in common about requests: layouts, prompts, and the engine's steps, beside the plain model."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import hetkv
from model.plain_layout import PlainGroup, PlainLayout
from model.reference_cache import Loss, ReferenceCache, ReferenceSequence, Report, Stamp, Version
from model.row_values import RowWriter, build_layout
from step_arrays import check_slots, check_tables

BLOCK = 16
SPACES = ("", "blue")


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


class RequestMachine(RuleBasedStateMachine):
    """What both machines do: requests in all their forms, and the engine's writes."""

    plain: PlainLayout
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
        self.buffers = hetkv.StepBuffers(self.cache, max_sequences=6, max_tokens=6 * 2 * BLOCK, max_sequence_tokens=208)
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

    @precondition(lambda self: self.live)
    @rule(first=picks, counts=st.lists(st.sampled_from([0, 1, 5, BLOCK, 2 * BLOCK]), min_size=1, max_size=5))
    def prepare_step(self, first: int, counts: list[int]) -> None:
        """One call for a whole batch: every sequence takes its step or none does, and the arrays say where."""
        batch = [self.pick(first + i) for i in range(min(len(counts), len(self.live)))]
        tokens = [min(count, len(one.tokens) - one.real.scheduled) for one, count in zip(batch, counts, strict=False)]
        begins = [one.real.scheduled for one in batch]
        buffers = self.buffers
        arrays = (*buffers.block_tables.values(), *buffers.slots.values(), buffers.cu_seqlens_q, buffers.seqused_k)
        for array in arrays:
            array.fill_(-7)
        stamps = self.attempt(lambda: self.cache.prepare_step([one.real for one in batch], tokens, buffers))
        if stamps is None:
            assert [one.real.scheduled for one in batch] == begins
            assert all(bool((array == -7).all()) for array in arrays)
            return
        ends = [begin + count for begin, count in zip(begins, tokens, strict=True)]
        assert [(stamp.begin, stamp.end) for stamp in stamps] == list(zip(begins, ends, strict=True))
        for one, stamp in zip(batch, stamps, strict=True):
            one.stamps.append((stamp, None if one.model is None else one.model.schedule(stamp.end)))
        idle = buffers.max_sequences - len(batch)
        sums = [sum(tokens[:i]) for i in range(len(batch) + 1)]
        assert buffers.cu_seqlens_q.tolist() == sums + [sums[-1]] * idle
        assert buffers.seqused_k.tolist() == ends + [0] * idle
        for group in self.plain.groups:
            check_tables(self.cache, self.plain, buffers, group, batch)
            check_slots(self.cache, buffers, group, batch, [range(stamp.begin, stamp.end) for stamp in stamps])

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
