"""The lowest-index tie rule for stock indexers.

Index scores pass a ReLU, so many are exactly 0. `torch.topk` breaks ties by the tensor's width, hence the same query
selects other entries in one chunking than in another. With the rule "score descending, then index ascending" the
selection depends on the scores alone. The rule changes which rows are read, so it belongs to the kernel ABI: a cache
filled with it must not be read without it (`ABI_FAMILY`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

ABI_FAMILY = "topk_tie_rule"
LOWEST_INDEX = 1
"""Value of the ABI integer with the rule installed; 0 stands for the library's own order."""

# The submodule whose output flows into the scores that `topk` sees, by class name of the indexer.
_SCORE_SOURCE = {"DeepseekV4Indexer": "scorer", "DeepseekV32Indexer": "weights_proj"}


class _TieStableScores(Tensor):
    """Scores whose `topk` is a stable descending sort. The mark survives arithmetic, so it reaches the indexer's `topk`."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.topk, torch.topk):
            return _stable_topk(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _stable_topk(scores: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: ARG001
    """`torch.topk` with ties resolved to the lowest index; always sorted."""
    plain = scores.as_subclass(Tensor)
    values, indices = torch.sort(plain, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _mark(module: nn.Module, args: Any, output: Tensor) -> Tensor:  # noqa: ARG001
    return output.as_subclass(_TieStableScores)


class TieRule:
    """The rule, installed in every indexer of one model instance; other instances are untouched.

    Installed on construction; `remove()` (or leaving the `with` block) restores the stock behaviour. Installing twice is
    harmless: the second instance finds the mark present and adds nothing. Keeps no reference that outlives the model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.num_indexers = 0
        for module in model.modules():
            source = _SCORE_SOURCE.get(type(module).__name__)
            if source is None:
                continue
            self.num_indexers += 1
            target = getattr(module, source)
            if _mark not in target._forward_hooks.values():
                self._handles.append(target.register_forward_hook(_mark))

    @property
    def installed(self) -> bool:
        """Whether this instance placed the rule and still holds it."""
        return bool(self._handles)

    def remove(self) -> None:
        """Takes the rule out of the indexers where this instance placed it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> TieRule:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def tie_rule_abi(model: nn.Module) -> dict[str, int]:
    """The ABI entry for `model` as it stands: empty if it has no indexer, else the rule in force."""
    indexers = [m for m in model.modules() if type(m).__name__ in _SCORE_SOURCE]
    if not indexers:
        return {}
    ruled = all(_mark in getattr(m, _SCORE_SOURCE[type(m).__name__])._forward_hooks.values() for m in indexers)
    return {ABI_FAMILY: LOWEST_INDEX if ruled else 0}
