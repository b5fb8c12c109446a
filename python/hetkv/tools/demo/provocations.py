"""What other caches get wrong, provoked one by one: each must shrink the reported hit for the right reason, and no output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...integrations.transformers import Retention
from .results import TurnResult
from .serving import ALIGNMENT, ServedModel

_EVERYTHING = 1 << 30


@dataclass(frozen=True)
class Provocation:
    """One disturbance. `reason`: the loss that must be reported; "" if the full hit must be back. `undo` runs after the turn."""

    label: str
    reason: str
    act: Callable[[], object]
    undo: Callable[[], object] | None = None


class Provocations:
    """Asks one prompt again and again, with something broken in between. Does not own the model."""

    def __init__(self, served: ServedModel, prompt: list[int]) -> None:
        self._served = served
        self._prompt = prompt

    def run(self) -> Iterator[TurnResult]:
        """One result per provocation; the first is the undisturbed turn."""
        yield self._ask(Provocation("undisturbed", "", lambda: None), 0)
        for provocation in self._list():
            before = self._hit()
            provocation.act()
            yield self._ask(provocation, before)
            if provocation.undo is not None:
                provocation.undo()

    def _list(self) -> Iterator[Provocation]:
        cache, served = self._served.cache, self._served
        groups = {group.name: group for group in served.adapter.groups}
        tails = [name for name, group in groups.items() if group.retention is Retention.TAIL]
        history = "csa_index" if "csa_index" in groups else "full"
        what = "indexer block gone" if history == "csa_index" else "history block gone"
        yield Provocation("windows evicted", "window_evicted", lambda: cache.evict("swa_window", _EVERYTHING))
        if tails:
            yield Provocation("tail evicted", "tail_evicted", lambda: cache.evict_object(self._prompt, self._hit(), tails[0]))
        yield Provocation(what, "incomplete", lambda: cache.quarantine(self._prompt, self._hit(), history, "incomplete"))
        yield Provocation("weights w1", "model_version", lambda: served.set_version("w1"))
        yield Provocation("weights w0 again", "", lambda: served.set_version("w0"))
        yield Provocation(
            "kernel ABI raised", "abi", lambda: cache.set_abi("window_attention", 2), lambda: cache.set_abi("window_attention", 1)
        )
        yield Provocation(
            "alignment raised",
            "layout",
            lambda: cache.declare_alignment("window_attention", 2 * ALIGNMENT),
            lambda: cache.declare_alignment("window_attention", ALIGNMENT),
        )

    def _hit(self) -> int:
        return self._served.cache.probe(self._prompt).num_recoverable_tokens

    def _ask(self, provocation: Provocation, before: int) -> TurnResult:
        return self._served.answer(self._prompt, provocation.label, expected_reason=provocation.reason, hit_before=before)
