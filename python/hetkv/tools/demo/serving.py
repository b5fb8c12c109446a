"""One tiny model that answers every request twice: through hetkv, and without it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hetkv

from ...integrations.transformers import PrefixCache, PrefixState, Runner, TokenCounter
from .models import build_model, config_of, draw_weights
from .reference import Answer, Ledger, Origin, References, Source
from .results import LostTokens, TurnResult
from .workload import ANSWER_TOKENS

BLOCK_SIZE = 64
ALIGNMENT = 128
"""Bytes; what the demo declares for its window kernels."""

Progress = Callable[[str], None]
"""Told in a few words what is being computed now."""


class ServedModel:
    """A model, its hetkv cache, and the plain runs that its answers are compared with.

    Owns all three. Weights "w0" come from `seed`, other versions from it and their name. Not thread-safe.
    """

    def __init__(
        self, name: str, vocabulary: int, seed: int, capacity: str | int, progress: Progress, *, store: Path | None = None
    ) -> None:
        self.name = name
        self._seed = seed
        self._progress = progress
        self.model: nn.Module = build_model(name, vocabulary, seed)
        layout = hetkv.CacheLayout.from_config(config_of(self.model), block_size=BLOCK_SIZE, dtype="float32")
        # The families of code that write or read the rows: transformers' own, in this demo.
        self.cache: hetkv.Cache = hetkv.Cache(
            layout, capacity=capacity, model_version="w0", abi={"window_attention": 1, "compressor": 1}, disk=_disk(store, name)
        )
        self.cache.declare_alignment("window_attention", ALIGNMENT)
        self.prefixes = PrefixCache(self.model, self.cache)
        self.adapter = self.prefixes.adapter
        self.runner = Runner(self.model, BLOCK_SIZE)
        self._counter = TokenCounter(self.model)
        self.ledger = Ledger(None if store is None else store / f"{name}-states.json")
        self._references: dict[str, References] = {}
        self.version = "w0"
        self.last_answer: list[int] = []

    @property
    def references(self) -> References:
        """The plain runs of the present weights."""
        return self._references.setdefault(self.version, References(self.runner, self.adapter, self.ledger))

    def set_version(self, version: str) -> None:
        """Loads other weights into the model, and tells the cache in the same breath."""
        draw_weights(self.model, self._seed if version == "w0" else self._seed + 1000 + sum(map(ord, version)))
        self.cache.set_model_version(version)
        self.version = version

    def answer(self, prompt: Sequence[int], label: str, *, expected_reason: str | None = None, hit_before: int = 0) -> TurnResult:
        """Answers `prompt` through hetkv, cold, and where it differs on the schedule that made the resumed state.

        expected_reason, hit_before: of a provocation; see `TurnResult`.
        """
        self._progress(f"{label}: through hetkv")
        warm, restored, report, computed = self._warm(prompt)
        self._progress(f"{label}: cold")
        cold = self.references.cold(prompt, ANSWER_TOKENS)
        source = self._source(prompt, warm.begin, restored)
        same = cold
        if not source.by_chunks:
            self._progress(f"{label}: uninterrupted")
            same = self._same_schedule(source, prompt, warm)
        result = TurnResult(
            label=label,
            prompt_tokens=report.num_prompt_tokens,
            hash_hit_tokens=report.num_hash_hit_tokens,
            recoverable_tokens=report.num_recoverable_tokens,
            restored_tokens=report.num_restored_tokens,
            losses=[LostTokens(str(loss.reason), loss.group, loss.tokens) for loss in report.losses],
            computed_tokens=computed,
            decoded_tokens=len(warm.tokens),
            origin=source.origin,
            difference_schedule=logit_difference(warm, same),
            difference_cold=logit_difference(warm, cold),
            tokens_equal=warm.tokens == cold.tokens == same.tokens,
            cold_first_token_ms=cold.first_token_seconds * 1e3,
            warm_first_token_ms=warm.first_token_seconds * 1e3,
            cold_ms=cold.seconds * 1e3,
            warm_ms=warm.seconds * 1e3,
            expected_reason=expected_reason,
            recoverable_before=hit_before,
        )
        result.judge()
        self.last_answer = warm.tokens
        return result

    def _warm(self, prompt: Sequence[int]) -> tuple[Answer, PrefixState, Any, int]:
        """Through hetkv: the answer, the state that it resumed from, the report, and how many prompt tokens were computed."""
        counted = self._counter.total
        started = time.perf_counter()
        with self.prefixes.open(prompt, max_new_tokens=ANSWER_TOKENS) as session:
            spent = time.perf_counter()
            begin = session.num_computed_tokens
            restored = self.adapter.export_state(session.cache)  # for the comparison; no part of the request
            spent = time.perf_counter() - spent
            rows = session.prefill(all_logits=True)
            first = time.perf_counter() - started - spent
            computed = self._counter.total - counted
            generation = session.decode(rows, ANSWER_TOKENS)
        seconds = time.perf_counter() - started - spent
        logits = torch.cat([rows[:-1], generation.logits])
        return Answer(begin, generation.tokens, logits, first, seconds), restored, session.report, computed

    def _source(self, prompt: Sequence[int], begin: int, restored: PrefixState) -> Source:
        if begin == 0:
            return Source(Origin.NONE, None)
        return self.references.trace(prompt[:begin], restored)

    def _same_schedule(self, source: Source, prompt: Sequence[int], warm: Answer) -> Answer:
        if source.cache is None:  # nothing to compare with: a difference that no reader can miss
            return Answer(warm.begin, [], torch.full_like(warm.logits, float("inf")), 0.0, 0.0)
        return self.references.resume(source, prompt, ANSWER_TOKENS)


def _disk(store: Path | None, name: str) -> hetkv.DiskTier | None:
    if store is None:
        return None
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    return hetkv.DiskTier(store / name, capacity="1GiB")


def logit_difference(warm: Answer, other: Answer) -> float:
    """Largest difference of logits over the tokens that both computed, up to the first token where the answers part."""
    agreed = next(
        (n for n, (left, right) in enumerate(zip(warm.tokens, other.tokens, strict=False)) if left != right), len(warm.tokens)
    )
    count = len(warm.logits) - max(0, len(warm.tokens) - 1 - agreed)
    theirs: Tensor = other.logits[warm.begin - other.begin :][:count]
    return float((warm.logits[:count] - theirs).abs().max())
