"""`hetkv demo --attach`: the same load on models that compute on hetkv's blocks, beside copying and beside cold runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

import hetkv

from ...integrations.transformers import Generation, PrefixCache, Runner
from ...integrations.transformers.attach import AttachedModel, attach
from .models import build_model, config_of
from .results import COLD_TOLERANCE
from .serving import BLOCK_SIZE, Progress
from .tokenizer import Tokenizer
from .workload import ANSWER_TOKENS, MAX_PROMPT_TOKENS, Workload

STEP_TOKENS = 256
"""Most tokens of one step of a batch."""

MOST_REROUTED = ANSWER_TOKENS // 50
"""Tokens of an answer that near-ties may route otherwise than in the cold run."""


@dataclass
class AttachedTurn:
    """One request, answered three times, the cold answer being right. Times in ms, of whole answers.

    rerouted: tokens whose logits differ by more than the tolerance. Where the last entry that the index takes and the first that
    it leaves score alike up to rounding, either may be taken. difference: largest of logits, over all other tokens.
    """

    label: str
    prompt_tokens: int
    recoverable_tokens: int
    cold_ms: float
    copied_ms: float
    attached_ms: float
    difference: float
    rerouted: int
    tokens_equal: bool

    @property
    def ok(self) -> bool:
        """Whether the answer is the cold one."""
        return self.tokens_equal and self.rerouted <= MOST_REROUTED


@dataclass
class AttachedResult:
    """One model: its turns, one by one, and then all of them at once. Times in ms."""

    model: str
    turns: list[AttachedTurn] = field(default_factory=list)
    batch_ms: float = 0.0
    batch_copied_ms: float = 0.0
    batch_equal: bool = False

    @property
    def ok(self) -> bool:
        """Whether every answer is the cold one."""
        return self.batch_equal and all(turn.ok for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        return asdict(self) | {"ok": self.ok}


class AttachedServing:
    """The same weights three times: stock and cold, copying in and out of hetkv, and attached. Each with a cache of its own."""

    def __init__(self, name: str, vocabulary: int, seed: int, capacity: str) -> None:
        self.name = name
        stock = build_model(name, vocabulary, seed)
        layout = hetkv.CacheLayout.from_config(config_of(stock), block_size=BLOCK_SIZE, dtype="float32")
        self._copying = PrefixCache(stock, hetkv.Cache(layout, capacity=capacity))
        self._runner = Runner(stock, BLOCK_SIZE)
        self._attached: AttachedModel = attach(
            build_model(name, vocabulary, seed),
            hetkv.Cache(layout, capacity=capacity),
            max_tokens=STEP_TOKENS,
            max_sequence_tokens=MAX_PROMPT_TOKENS + 2 * ANSWER_TOKENS,
        )

    def answer(self, prompt: Sequence[int], label: str) -> tuple[AttachedTurn, list[int]]:
        """One request, cold, by copying and attached; and its answer."""
        cold, cold_ms = _timed(lambda: self._cold(prompt))
        _, copied_ms = _timed(lambda: self._copying.generate(list(prompt), ANSWER_TOKENS))
        hit = self._attached.cache.probe(list(prompt)).num_recoverable_tokens
        (answer,), attached_ms = _timed(lambda: self._attached.generate([list(prompt)], ANSWER_TOKENS))
        differences, equal = compared(answer, cold)
        turn = AttachedTurn(label, len(prompt), hit, cold_ms, copied_ms, attached_ms, *_agreement(differences), equal)
        return turn, cold.tokens

    def together(self, prompts: list[list[int]]) -> tuple[float, float, bool]:
        """All prompts again: one ragged batch, then one by one by copying. Times in ms, and whether the tokens are equal."""
        answers, batch_ms = _timed(lambda: self._attached.generate(prompts, ANSWER_TOKENS))
        copied, copied_ms = _timed(lambda: [self._copying.generate(prompt, ANSWER_TOKENS) for prompt in prompts])
        pairs = [compared(answer, other) for answer, other in zip(answers, copied, strict=True)]
        alike = all(_agreement(differences)[1] <= MOST_REROUTED for differences, _ in pairs)
        return batch_ms, copied_ms, alike and all(equal for _, equal in pairs)

    def _cold(self, prompt: Sequence[int]) -> Generation:
        cache = self._copying.adapter.new_cache()
        return self._runner.decode(cache, self._runner.prefill(cache, list(prompt), 0), len(prompt), ANSWER_TOKENS)


def compared(answer: Generation, other: Generation) -> tuple[Tensor, bool]:
    """Largest difference of logits per token, and whether the tokens are equal, up to a choice that rounding decides.

    Two tokens whose logits differ by less than the answers may differ are a tie: after it the answers are about other texts.
    """
    count = len(other.tokens)
    for n, (left, right) in enumerate(zip(answer.tokens, other.tokens, strict=True)):
        if left != right:
            if float((other.logits[n][left] - other.logits[n][right]).abs()) > 2 * COLD_TOLERANCE:
                return torch.full((count,), torch.inf), False
            count = n + 1
            break
    return (answer.logits[:count] - other.logits[:count]).abs().amax(dim=1), True


def _agreement(differences: Tensor) -> tuple[float, int]:
    """The largest difference within the tolerance, and how many are above it."""
    alike = differences[differences <= COLD_TOLERANCE]
    return float(alike.max()) if len(alike) else 0.0, len(differences) - len(alike)


def run_attached(name: str, tokenizer: Tokenizer, *, turns: int, capacity: str, seed: int, line: Progress) -> AttachedResult:
    """Serves the demo's load on one attached model and prints a line per request."""
    serving = AttachedServing(name, tokenizer.vocabulary, seed, capacity)
    workload = Workload(tokenizer, seed)
    result = AttachedResult(name)
    prompts: list[list[int]] = []
    line(f"\n{name}, attached: {turns} turns, arena of {capacity}; ms of whole answers of {ANSWER_TOKENS} tokens")
    line(" # turn                 prompt  recoverable  cold ms  copied ms  attached ms  diff cold  rerouted  tokens")
    for number in range(turns):
        turn = workload.next_turn()
        row, answer = serving.answer(turn.prompt, turn.label)
        prompts.append(list(turn.prompt))
        turn.finish(answer)
        result.turns.append(row)
        tokens = "equal" if row.tokens_equal else "DIFFER"
        line(
            f"{number + 1:>2} {row.label:<20} {row.prompt_tokens:>6} {row.recoverable_tokens:>12} {row.cold_ms:>8.0f} "
            f"{row.copied_ms:>10.0f} {row.attached_ms:>12.0f} {row.difference:>10.1e} {row.rerouted:>9}  {tokens}"
        )
    result.batch_ms, result.batch_copied_ms, result.batch_equal = serving.together(prompts)
    copied, attached = (sum(getattr(row, key) for row in result.turns) for key in ("copied_ms", "attached_ms"))
    line(
        f"{name}: one by one {copied / attached:.2f} times as fast as copying; all {turns} in one ragged batch "
        f"{result.batch_copied_ms / result.batch_ms:.2f} times; {'all outputs as promised' if result.ok else 'NOT AS PROMISED'}"
    )
    return result


def _timed(call: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    with torch.no_grad():
        value = call()
    return value, (time.perf_counter() - started) * 1e3
