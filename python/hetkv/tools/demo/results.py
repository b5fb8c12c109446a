"""What the demo records: one `TurnResult` per request, one `Sensitivity` per zeroed row. All of it goes to the JSON file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from .reference import Origin

COLD_TOLERANCE = 1e-4
"""Largest logit difference to a cold prefill when the resumed state was made by decoding."""

SENSITIVITY = 1e-2
"""Smallest logit change that zeroing one row must cause."""


@dataclass(frozen=True)
class LostTokens:
    """One loss of a hit report."""

    reason: str
    group: str | None
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} {self.reason}" + (f" ({self.group})" if self.group else "")


@dataclass
class TurnResult:
    """One request, answered through hetkv and compared with plain runs.

    difference_schedule: largest logit difference to the run of the same schedule; exactly 0.0 is right. difference_cold: to a
    cold prefill. Both over every token from the resume point to the end of the answer. restored_tokens: of the recoverable
    ones, those that came from the disk. computed_tokens: tokens of the prompt that the embedding layer saw. expected_reason:
    the loss that a provocation must cause, "" if it must cause none, None for a turn of the load. recoverable_before: what the
    prompt could resume just before a provocation.
    """

    label: str
    prompt_tokens: int
    hash_hit_tokens: int
    recoverable_tokens: int
    losses: list[LostTokens]
    restored_tokens: int
    computed_tokens: int
    decoded_tokens: int
    origin: Origin
    difference_schedule: float
    difference_cold: float
    tokens_equal: bool
    cold_first_token_ms: float
    warm_first_token_ms: float
    cold_ms: float
    warm_ms: float
    expected_reason: str | None = None
    recoverable_before: int = 0
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Fills `problems` with everything that is not as promised."""
        if not self.tokens_equal:
            self.problems.append("tokens differ")
        if self.difference_schedule != 0.0:
            self.problems.append(f"differs from the run of the same schedule by {self.difference_schedule:.1e}")
        if not self.difference_cold <= COLD_TOLERANCE:
            self.problems.append(f"differs from a cold prefill by {self.difference_cold:.1e}")
        if self.origin is Origin.UNKNOWN:
            self.problems.append("the restored state was never computed by any run")
        if self.computed_tokens != self.prompt_tokens - self.recoverable_tokens:
            self.problems.append(f"computed {self.computed_tokens}, not {self.prompt_tokens - self.recoverable_tokens} tokens")
        if sum(loss.tokens for loss in self.losses) != self.prompt_tokens - self.recoverable_tokens:
            self.problems.append("the losses do not sum to what was lost")
        self._judge_provocation()

    def _judge_provocation(self) -> None:
        if self.expected_reason is None:
            return
        reasons = {loss.reason for loss in self.losses}
        if not self.expected_reason:
            if foreign := reasons & {"model_version", "abi", "layout"}:
                self.problems.append(f"still loses tokens to {', '.join(sorted(foreign))}")
        elif self.recoverable_before:  # with no hit to begin with there is nothing to shrink
            if self.expected_reason not in reasons:
                self.problems.append(f"no loss {self.expected_reason!r} reported")
            if self.recoverable_tokens >= self.recoverable_before:
                self.problems.append(f"the hit did not shrink from {self.recoverable_before}")

    @property
    def ok(self) -> bool:
        """Whether everything was as promised. Call `judge` first."""
        return not self.problems


@dataclass(frozen=True)
class Sensitivity:
    """How much the logits change when one row in the arena is zeroed, within 160 tokens."""

    group: str
    row: str
    change: float

    @property
    def ok(self) -> bool:
        """Whether the check would see such an error."""
        return self.change >= SENSITIVITY


@dataclass
class ModelResult:
    """Everything about one model."""

    model: str
    capacity_bytes: int
    turns: list[TurnResult] = field(default_factory=list)
    provocations: list[TurnResult] = field(default_factory=list)
    sensitivity: list[Sensitivity] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether no output and no number differed from what was promised."""
        return all(row.ok for row in [*self.turns, *self.provocations]) and all(item.ok for item in self.sensitivity)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`."""
        plain = asdict(self)
        for key in ("turns", "provocations"):
            for row in plain[key]:
                row["origin"] = row["origin"].value
        return plain | {"ok": self.ok}
