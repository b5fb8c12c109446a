"""One running request: its tokens, its blocks, and the prefix that it resumed from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from . import _core
from .report import HitReport
from .tokens import TokenInput, as_token_ids

if TYPE_CHECKING:
    from .cache import Cache

__all__ = ["PublishResult", "Sequence"]


class PublishResult(NamedTuple):
    """published_tokens: how many tokens of this sequence are matchable now. status: whether and why it stopped short."""

    published_tokens: int
    status: _core.PublishOutcome


class Sequence:
    """A running request, made by ``Cache.admit``; give it back with ``free``, or use it in a ``with`` statement.

    Counters, in tokens: ``num_tokens`` known >= ``scheduled`` (handed to the device) >= ``settled`` (bytes written).

    One thread at a time: a second one gets RuntimeError. After ``free`` everything but ``report``, ``num_computed_tokens``,
    ``live`` and ``free`` raises ArgumentError, which is a ValueError. Keeps the cache alive. Groups are given by name or id.

    Blocks that last belonged to another group are zeroed before this sequence sees them.
    """

    __slots__ = ("_cache", "_core", "_report")

    def __init__(self, cache: Cache, core: _core.Sequence) -> None:
        self._cache = cache
        self._core = core
        self._report: HitReport | None = None
        if core.ready:
            core.wait()  # ends the admission
            self._clear()

    # --- a restore ---

    @property
    def ready(self) -> bool:
        """False while something is being loaded for it: until then only ``wait``, ``when_ready`` and ``free`` may be called.

        Anything else raises PendingError. The first use afterwards ends the admission.
        """
        return self._core.ready

    def wait(self) -> Self:
        """Waits until it is ready; returns itself. AdmissionError, and it is freed, if what was not loaded finds no room."""
        self._core.wait()
        self._clear()
        return self

    def when_ready(self, callback: Callable[[], object]) -> None:
        """Calls ``callback`` once: at once if it is ready, else on the thread that ends the restore: keep it short."""
        self._core.when_ready(callback)

    def __await__(self) -> Generator[Any, None, Self]:
        """``await sequence`` is ``wait`` for coroutines."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def done() -> None:
            if not ready.done():
                ready.set_result(None)

        def pass_on() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(done)

        self.when_ready(pass_on)
        yield from ready
        return self.wait()

    # --- what admission decided ---

    @property
    def report(self) -> HitReport:
        """The report of the admission: a promise, where that of ``Cache.probe`` is a forecast."""
        if self._report is None:
            self._report = HitReport.from_core(self._core.report())
        return self._report

    @property
    def num_computed_tokens(self) -> int:
        """p: resume here. Restore R(p) from the blocks, then compute tokens from p on."""
        return self._core.num_computed_tokens

    def point_block(self, group: str | int) -> int | None:
        """Offset of the tail or snapshot block that holds the state at ``num_computed_tokens``; None if R(p) asks for none.

        Valid until ``free``. Read it with ``Cache.read_block``.
        """
        return self._core.point_block(self._cache.group_id(group))

    def live_block(self, group: str | int) -> int | None:
        """Offset of the running ring (tail) or state (snapshot) block; None unless admitted with ``live_state=True``."""
        return self._core.live_block(self._cache.group_id(group))

    # --- counters ---

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was appended."""
        return self._core.num_tokens

    @property
    def scheduled(self) -> int:
        """Tokens handed to the device; starts at ``num_computed_tokens``."""
        return self._core.scheduled

    @property
    def settled(self) -> int:
        """Tokens whose bytes are written."""
        return self._core.settled

    @property
    def accepted(self) -> int:
        """Tokens given to ``accept``; counts only after ``hold_acceptance``."""
        return self._core.accepted

    @property
    def published_tokens(self) -> int:
        """Tokens of this sequence that others can match, resumed ones included."""
        return self._core.published_tokens

    @property
    def version(self) -> int:
        """Id of the version under which the sequence was admitted."""
        return self._core.version

    @property
    def epoch(self) -> int:
        """Raised by ``restart_from_settled``."""
        return self._core.epoch

    @property
    def live(self) -> bool:
        """Not freed."""
        return self._core.live

    @property
    def ok(self) -> bool:
        """Whether everything that it was admitted with is still good: False after a quarantine of what it reads."""
        return self._core.ok

    # --- steps ---

    def append(self, ids: int | TokenInput) -> None:
        """Generated tokens become known: one id or an array of ids, possibly empty. ArgumentError for ids out of range."""
        if isinstance(ids, int | np.integer):
            self._core.append(as_token_ids([int(ids)], "ids"))
        else:
            self._core.append(as_token_ids(ids, "ids", may_be_empty=True))

    def schedule(self, upto: int) -> _core.StepStamp:
        """Makes sure that the rows of tokens [scheduled, upto) have blocks, and returns the stamp of the step.

        AdmissionError if memory is short; then nothing changed. ArgumentError unless scheduled <= upto <= num_tokens.
        """
        stamp = self._core.schedule(upto)
        self._clear()
        return stamp

    def settle(self, stamp: _core.StepStamp, *, batch_invariant: bool = True) -> bool:
        """The step's bytes are written. False, and no effect, if it was scheduled before ``restart_from_settled``.

        Rows of a step that ran under another version than the sequence's count, but are never published. batch_invariant: this
        sequence was computed as if it were alone in the step; without that its rows are never canonical.
        """
        return self._core.settle(stamp, batch_invariant)

    def check_version(self) -> None:
        """StaleVersionError if weights, ABI or layout changed since the admission: rows computed now would never be published."""
        self._core.check_version()

    def restart_from_settled(self) -> None:
        """Forgets steps that were scheduled and not settled: late results of theirs are dropped."""
        self._core.restart_from_settled()

    def hold_acceptance(self) -> None:
        """From now on only tokens given to ``accept`` slide and are published: for speculative decoding."""
        self._core.hold_acceptance()

    def accept(self, upto: int) -> None:
        """Tokens below ``upto`` are not open to rollback any more. Never lowers."""
        self._core.accept(upto)

    # --- checkpoints and publication ---

    def wants_point(self, position: int) -> bool:
        """Whether the retention policy wants the tail, snapshot and window at this block boundary (in tokens)."""
        return self._core.wants_point(position)

    def stage_point(self, position: int) -> dict[str, int]:
        """Blocks for the state at ``position``, by group: one for every tail and snapshot group that R(position) asks for.

        Write each with ``Cache.write_block``, then call ``commit_point``. Empty if the policy does not want the point, if
        nothing is asked for there, or if memory is short: a checkpoint is never worth a refusal. ArgumentError unless
        ``position`` is a multiple of block_size in (num_computed_tokens, num_tokens].
        """
        staged = self._core.stage_point(position)
        if not staged:
            return {}
        self._clear()
        names = self._cache.group_names
        return {names[group]: offset for group, offset in staged}

    def commit_point(self, position: int, state_positions: Mapping[str, int]) -> None:
        """Proof: the staged block of each group holds the state at the position given with it.

        All proofs are checked before the first is taken: PositionError if one is not ``position``, ArgumentError for a group that
        was not staged there.
        """
        self._core.commit_point(position, [(self._cache.group_id(group), at) for group, at in state_positions.items()])

    def publish(self, upto: int | None = None) -> PublishResult:
        """Whole blocks below ``upto`` (default: all), settled and accepted, become matchable, with the points due there."""
        return PublishResult(*self._core.publish(upto))

    def hashed_prefix(self) -> _core.HashedPrefix:
        """The keys of its whole blocks: as ``previous=`` of the conversation's next ``admit``, no token is hashed twice."""
        return self._core.hashed_prefix()

    def free(self, turn_end: bool = True) -> None:
        """Gives everything back, so call it only when the device is done with the last scheduled step. Idempotent.

        turn_end: the turn ended here, so what is settled is published, with the points that the policy keeps for the end of a
        turn.
        """
        self._core.free(turn_end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.free(turn_end=kind is None)

    # --- addresses ---

    def block_table(self, group: str | int) -> npt.NDArray[np.int32]:
        """int32 [blocks]: a copy of the group's table, offsets in units of 256 bytes.

        History: one entry per block of the group, row r in entry r // entries_per_block. Window: one per block_size tokens.
        Blocks that slid out of the window, or were never loaded, are the scratch block. Tail and snapshot: empty.
        """
        return self._core.block_table(self._cache.group_id(group))

    def slot_mapping(self, group: str | int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """int64 [end - begin]: slots of the group's own rows [begin, end): entries of a history, tokens of a window.

        ArgumentError for rows that have no block yet.
        """
        return self._core.slot_mapping(self._cache.group_id(group), begin, end)

    def token_slots(self, group: str | int, begin: int, end: int) -> npt.NDArray[np.int64]:
        """int64 [end - begin]: one slot per token of [begin, end), for writing.

        Where the row or entry that this token completes is stored; a slot of the scratch block where it completes none. For tails
        the row of the running ring, in rows of the ring; for snapshots the running state.
        """
        return self._core.token_slots(self._cache.group_id(group), begin, end)

    # --- inside ---

    def _clear(self) -> None:
        ranges = self._core.ranges_to_clear()
        if ranges:
            arena = self._cache.arena
            for begin, end in ranges:
                arena[begin:end].zero_()
            self._core.confirm_cleared()

    def __repr__(self) -> str:
        if not self._core.live:
            return "<hetkv.Sequence, freed>"
        if not self.ready:
            return "<hetkv.Sequence, waiting for a restore>"
        return f"<hetkv.Sequence of {self.num_tokens} tokens, {self.scheduled} scheduled, {self.published_tokens} published>"

    def __reduce__(self) -> Any:
        raise TypeError("a hetkv.Sequence cannot be pickled: it holds memory of its cache")
