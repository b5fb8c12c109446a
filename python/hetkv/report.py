"""What a prompt can resume from, and why the rest was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["HitReport", "Loss", "LossReason"]


class LossReason(StrEnum):
    """Why tokens cannot be resumed from, in the order of the checks."""

    GRANULARITY = "granularity"
    """the last, incomplete block of the prompt"""
    NOT_FOUND = "not_found"
    """no such prefix was ever published here"""
    EVICTED = "evicted"
    """it was, and was evicted"""
    LAYOUT = "layout"
    """the bytes are laid out for another layout or alignment"""
    ABI = "abi"
    """written or read by another kernel ABI"""
    MODEL_VERSION = "model_version"
    """written by other weights"""
    NOT_RESTORED = "not_restored"
    """on a lower tier only"""
    INCOMPLETE = "incomplete"
    """a block of the history set is gone"""
    CHECKSUM = "checksum"
    """its bytes did not verify"""
    INDEX_STALE = "index_stale"
    """the index and what it indexes are not of the same publication"""
    GROUP_MISSING = "group_missing"
    """the point object was never published at this position"""
    WINDOW_EVICTED = "window_evicted"
    """window rows were published and evicted"""
    TAIL_EVICTED = "tail_evicted"
    """tail state was published and evicted"""
    TAIL_MISALIGNED = "tail_misaligned"
    """tail state exists, but only at other positions"""
    SNAPSHOT_EVICTED = "snapshot_evicted"
    """a snapshot was published and evicted"""
    LAST_TOKEN = "last_token"
    """at least one token must be computed to have logits"""


@dataclass(frozen=True, slots=True)
class Loss:
    """Tokens lost for one reason.

    group: name of the group to blame, or None where no single one is. tokens: how many, at least 1.
    """

    reason: LossReason
    group: str | None
    tokens: int


@dataclass(frozen=True, slots=True)
class HitReport:
    """Up to which token a prompt can resume, and what became of the rest. All numbers are tokens.

    num_prompt_tokens: length of the prompt. num_hash_hit_tokens: longest prefix known in any version on any tier.
    num_history_tokens: longest prefix whose history is there in the running version. num_recoverable_tokens: resume here.
    num_restored_tokens: how many of these only because of lower tiers; restore_bytes: loaded for them, or in a forecast to
    load. losses: in the order of the checks; they sum to num_prompt_tokens - num_recoverable_tokens. canonical: all that is
    resumed from was computed in chunks that end at every multiple of block_size, so the continuation equals a cold run of that
    schedule bit for bit; else it equals the conversation that made the state, and others up to rounding. None in a forecast;
    not compared.
    """

    num_prompt_tokens: int
    num_hash_hit_tokens: int
    num_history_tokens: int
    num_recoverable_tokens: int
    losses: tuple[Loss, ...]
    canonical: bool | None = field(default=None, compare=False)
    num_restored_tokens: int = field(default=0, compare=False)
    restore_bytes: int = field(default=0, compare=False)

    @classmethod
    def from_core(
        cls, fields: tuple[int, int, int, int, tuple[tuple[str, str | None, int], ...], bool | None, int, int]
    ) -> HitReport:
        """From what the core returns."""
        losses = tuple(Loss(LossReason(reason), group, tokens) for reason, group, tokens in fields[4])
        return cls(*fields[:4], losses, *fields[5:])

    def lost(self, reason: LossReason | str, group: str | None = None) -> int:
        """Tokens lost for a reason, of one group or of all."""
        return sum(loss.tokens for loss in self.losses if loss.reason == reason and group in (None, loss.group))

    def __str__(self) -> str:
        text = f"resume at {self.num_recoverable_tokens} of {self.num_prompt_tokens} tokens (hash hit {self.num_hash_hit_tokens})"
        parts = [f"{loss.tokens} {loss.reason}" + (f" in {loss.group}" if loss.group else "") for loss in self.losses]
        if self.num_restored_tokens:
            text += f", {self.num_restored_tokens} of them from lower tiers"
        return text + ("; lost: " + ", ".join(parts) if parts else "")
