"""Prefix reuse for one transformers model: give it a model and a hetkv cache, and prompts resume where they can."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .attention_abi import ATTENTION_FAMILY, STOCK, check_attention
from .families import adapter_for
from .schedule import Generation
from .session import Session
from .state import Retention, StateAdapter, UnsupportedModelError
from .tie_rule import TieRule, tie_rule_abi

if TYPE_CHECKING:
    from ... import Cache, HashedPrefix, Namespace


class PrefixCache:
    """Binds a model to a hetkv cache and opens sessions on it.

    Installs the lowest-index tie rule in the model's indexers, if it has any, and names it in the cache's ABI; `close` takes it
    out again. Owns neither model nor cache; both must outlive it. Sessions of one model run one after the other or interleaved,
    on one thread.

    model: a causal language model of a served type, in evaluation mode, on one device.
    cache: made from the same config (`hetkv.CacheLayout.from_config(model.config, ...)`) in the model's dtype.
    UnsupportedModelError if the model cannot be served, or if model and cache disagree.
    """

    def __init__(self, model: nn.Module, cache: Cache) -> None:
        self.model = model
        self.cache = cache
        self.adapter: StateAdapter = adapter_for(model)
        check_layout(self.adapter, cache)
        _check_generation(model)
        self._tie_rule = TieRule(model)
        for family, value in {ATTENTION_FAMILY: STOCK, **tie_rule_abi(model)}.items():
            cache.set_abi(family, value)

    def open(
        self,
        tokens: SequenceOf[int] | Tensor,
        *,
        max_new_tokens: int = 0,
        namespace: Namespace | None = None,
        previous: HashedPrefix | None = None,
    ) -> Session:
        """Admits a request and fills a fresh transformers cache with what can be resumed.

        tokens: the whole prompt, token ids, [n] or [1, n], n >= 1. max_new_tokens: reserved at once, so that decoding cannot
        run out of memory. previous: the hashed prefix of the conversation's last turn.
        AdmissionError if the memory is short; ValueError for an empty prompt; UnsupportedModelError for a batch.
        """
        ids = _token_list(tokens)
        check_attention(self.cache, STOCK)
        sequence = self.cache.admit(ids, namespace=namespace, max_new_tokens=max_new_tokens, previous=previous)
        try:
            return Session(self.model, self.adapter, self.cache, sequence, ids)
        except BaseException:
            sequence.free(turn_end=False)
            raise

    def generate(
        self,
        tokens: SequenceOf[int] | Tensor,
        max_new_tokens: int,
        *,
        namespace: Namespace | None = None,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> Generation:
        """One whole turn: open, prefill, greedy decoding, close."""
        with self.open(tokens, max_new_tokens=max_new_tokens, namespace=namespace) as session:
            return session.generate(max_new_tokens, stop_tokens=stop_tokens)

    def close(self) -> None:
        """Takes the tie rule out of the model. The cache keeps its entries."""
        self._tie_rule.remove()


def _token_list(tokens: SequenceOf[int] | Tensor) -> list[int]:
    if isinstance(tokens, Tensor):
        if tokens.dim() == 2 and tokens.shape[0] != 1:
            raise UnsupportedModelError(f"batch of {tokens.shape[0]}; a session serves one sequence")
        tokens = tokens.reshape(-1).tolist()
    ids = [int(token) for token in tokens]
    if not ids:
        raise ValueError("an empty prompt has nothing to compute")
    return ids


def _check_generation(model: nn.Module) -> None:
    implementation = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if implementation not in (None, "dynamic"):
        raise UnsupportedModelError(f"generation_config asks for a {implementation!r} cache; only dynamic ones are served")


def check_layout(adapter: StateAdapter, cache: Cache) -> None:
    """The cache must have the adapter's groups: same names, layers, ratios, windows, fields and dtype."""
    groups = {group.name: group for group in cache.layout.groups}
    own = {group.name for group in adapter.groups}
    if own != set(groups):
        raise UnsupportedModelError(f"the model keeps groups {sorted(own)}, the cache was laid out for {sorted(groups)}")
    for group in adapter.groups:
        laid = groups[group.name]
        ratio = group.ratio if group.retention in (Retention.HISTORY, Retention.TAIL) else 1
        mine = (group.layers, ratio, group.window, group.fields)
        theirs = (tuple(laid.layers), laid.compress_ratio, laid.spec.window, tuple(field.name for field in laid.fields))
        if mine != theirs:
            raise UnsupportedModelError(f"group {group.name!r}: the model has {mine}, the cache was laid out for {theirs}")
        stored = laid.fields[0].dtype.name
        if stored != str(adapter.dtype).removeprefix("torch."):
            raise UnsupportedModelError(f"the model computes in {adapter.dtype}, the cache was laid out for {stored}")
