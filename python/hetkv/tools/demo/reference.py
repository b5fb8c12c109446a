"""Plain transformers runs that never touch hetkv: what every answer is compared with.

A run keeps a deep copy of its cache at every block boundary. A resumed request is compared with a run of the *same
schedule*: the cold run if its state was made by chunks, the uninterrupted conversation if it was made by decoding. Which
one it is, is decided by the bits of the restored state, never by asking hetkv.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ...integrations.transformers import GroupState, PrefixState, Retention, Rows, Runner, StateAdapter

_KEPT_SNAPSHOTS = 1200


@dataclass
class Answer:
    """What one run produced.

    logits: [computed positions, vocabulary], from token `begin` on; the last len(tokens) rows chose `tokens`.
    first_token_seconds: wall time from the request to the logits that choose the first token. seconds: of the whole run.
    """

    begin: int
    tokens: list[int]
    logits: Tensor
    first_token_seconds: float
    seconds: float


class Origin(Enum):
    """How the restored state was made, as far as its bits tell."""

    NONE = "none"  # nothing was restored
    CHUNKS = "chunks"  # equal to what a cold prefill computes
    DECODING = "decoding"  # equal to the state of one uninterrupted conversation
    EARLIER = "earlier"  # equal to a state that a plain run of an earlier process passed over
    MIXED = "mixed"  # every block equals one run's, but not all the same run's: a healed checkpoint over older history
    UNKNOWN = "unknown"  # some row was never computed by any run: wrong bytes


@dataclass(frozen=True)
class _Snapshot:
    """A private copy of a cache, and whether every row of it was made by chunks."""

    cache: DynamicCache
    by_chunks: bool


@dataclass(frozen=True)
class Source:
    """Where a restored state comes from: its origin, and a plain cache to continue the same schedule from."""

    origin: Origin
    cache: DynamicCache | None

    @property
    def by_chunks(self) -> bool:
        """Whether a run that continues from here makes rows that a cold prefill would make too."""
        return self.origin in (Origin.NONE, Origin.CHUNKS)


def same_rows(left: Rows, right: Rows) -> bool:
    """Whether two sets of rows agree in every field and bit."""
    return left.keys() == right.keys() and all(torch.equal(left[field], right[field]) for field in left)


def same_state(left: PrefixState, right: PrefixState) -> bool:
    """Whether two states agree in every group, field and bit."""
    return left.keys() == right.keys() and all(same_rows(left[group], right[group]) for group in left)


def state_digest(state: PrefixState) -> str:
    """Of every group, field and bit."""
    digest = hashlib.blake2b(digest_size=16)
    for group in sorted(state):
        for field in sorted(state[group]):
            rows = state[group][field]
            digest.update(f"{group} {field} {rows.dtype} {tuple(rows.shape)}".encode())
            digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class Ledger:
    """Digests of the states that plain runs passed over, kept in a file: a later process checks by them what it restores."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._digests: dict[str, set[str]] = {key: set(digests) for key, digests in known.items()}
        self._earlier = {key: frozenset(digests) for key, digests in self._digests.items()}

    def note(self, tokens: Sequence[int], state: PrefixState) -> None:
        """A plain run passed over this state."""
        if self._path is not None:
            self._digests.setdefault(_key(tokens).hex(), set()).add(state_digest(state))

    def knew(self, tokens: Sequence[int], state: PrefixState) -> bool:
        """Whether a plain run of an earlier process did."""
        return bool(self._earlier) and state_digest(state) in self._earlier.get(_key(tokens).hex(), frozenset())

    def save(self) -> None:
        """Writes the file, in place of the old one."""
        if self._path is None:
            return
        text = json.dumps({key: sorted(digests) for key, digests in sorted(self._digests.items())})
        fresh = self._path.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self._path)


def _key(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=16).digest()


class References:
    """Runs the model without hetkv and remembers the states that it passed over.

    Owns copies of caches, the oldest are dropped beyond a fixed number. Does not own the model. Not thread-safe.
    """

    def __init__(self, runner: Runner, adapter: StateAdapter, ledger: Ledger) -> None:
        self._runner = runner
        self._adapter = adapter
        self._ledger = ledger
        self._snapshots: OrderedDict[bytes, list[_Snapshot]] = OrderedDict()
        self._count = 0

    def cold(self, prompt: Sequence[int], new_tokens: int) -> Answer:
        """The whole prompt in chunks, then greedy decoding."""
        return self.resume(Source(Origin.NONE, self._adapter.new_cache()), prompt, new_tokens)

    def resume(self, source: Source, prompt: Sequence[int], new_tokens: int, forced: Sequence[int] | None = None) -> Answer:
        """The rest of `prompt` in chunks on a copy of the source's cache, then greedy decoding, or `forced` tokens fed instead.

        ValueError if the source has no cache.
        """
        if source.cache is None:
            raise ValueError("no run ever passed over this prefix, so there is nothing to continue")
        cache = copy.deepcopy(source.cache)
        begin = self._adapter.length(cache)
        known = list(prompt)
        spent = 0.0  # on copies, which are no part of the run

        def keep(live: DynamicCache, length: int) -> None:
            nonlocal spent
            if length % self._runner.block_size == 0:
                started = time.perf_counter()
                self._remember(known[:length], live, source.by_chunks and length <= len(prompt))
                spent += time.perf_counter() - started

        started = time.perf_counter()
        rows = self._runner.prefill(cache, prompt, begin, after_chunk=keep, all_logits=True)
        first = time.perf_counter() - started - spent
        generation = self._runner.decode(
            cache, rows, len(prompt), new_tokens, before_token=known.append, after_token=keep, forced=forced
        )
        seconds = time.perf_counter() - started - spent
        return Answer(begin, generation.tokens, torch.cat([rows[:-1], generation.logits]), first, seconds)

    def trace(self, tokens: Sequence[int], restored: PrefixState) -> Source:
        """Finds the plain state that `restored`, the state after `tokens`, equals."""
        candidates = self._snapshots.get(_key(tokens), [])
        for snapshot in candidates:
            if same_state(restored, self._adapter.export_state(snapshot.cache)):
                return Source(Origin.CHUNKS if snapshot.by_chunks else Origin.DECODING, snapshot.cache)
        if self._ledger.knew(tokens, restored):
            return Source(Origin.EARLIER, self._adapter.restore(len(tokens), restored))
        if candidates and self._every_block_is_known(tokens, restored):
            self._ledger.note(tokens, restored)
            return Source(Origin.MIXED, self._adapter.restore(len(tokens), restored))
        return Source(Origin.UNKNOWN, candidates[-1].cache if candidates else None)

    def _every_block_is_known(self, tokens: Sequence[int], restored: PrefixState) -> bool:
        """Whether the rows of each block and group equal the rows that some run computed for this very prefix."""
        block, position = self._runner.block_size, len(tokens)
        for end in range(block, position + 1, block):
            caches = [snapshot.cache for snapshot in self._snapshots.get(_key(tokens[:end]), [])]
            for group in self._adapter.groups:
                if not any(self._rows_match(cache, restored, group, position, end) for cache in caches):
                    return False
        return True

    def _rows_match(self, cache: DynamicCache, restored: PrefixState, group: GroupState, position: int, end: int) -> bool:
        """Whether `cache`, at `end`, has the rows of the block before `end` as `restored`, at `position`, has them."""
        begin = end - self._runner.block_size
        first, _ = group.need(position)
        if group.retention is Retention.HISTORY:
            own = (begin // group.ratio, end // group.ratio)
            expected = self._adapter.export_history(cache, group, *own)
        elif group.retention is Retention.WINDOW:
            own = (max(begin, first), end)
            if own[0] >= own[1]:
                return True
            expected = self._adapter.export_window(cache, group, *own)
        elif end < position:
            return True
        else:
            return same_rows(restored[group.name], self._adapter.export_point(cache, group))
        rows = {field: values[:, own[0] - first : own[1] - first] for field, values in restored[group.name].items()}
        return same_rows(rows, expected)

    def _remember(self, tokens: Sequence[int], cache: DynamicCache, by_chunks: bool) -> None:
        """Keeps a copy of `cache`, the state after `tokens`, unless an equal one is there."""
        known = self._snapshots.setdefault(_key(tokens), [])
        self._snapshots.move_to_end(_key(tokens))
        state = self._adapter.export_state(cache)
        if any(same_state(state, self._adapter.export_state(other.cache)) for other in known):
            return
        known.append(_Snapshot(copy.deepcopy(cache), by_chunks))
        self._ledger.note(tokens, state)
        self._count += 1
        while self._count > _KEPT_SNAPSHOTS:
            _, oldest = self._snapshots.popitem(last=False)
            self._count -= len(oldest)
