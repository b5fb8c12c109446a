"""One compute schedule for cold and warm requests: chunks that end at every multiple of `block_size`, then single tokens.

The same prefix computed in other chunks differs in its last bits. With one schedule, a row's bits depend on the token
prefix alone, so a resumed request and a cold one agree exactly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

AfterPass = Callable[[DynamicCache, int], None]
"""Called after each forward pass with the cache and the number of tokens it holds."""

BeforeChunk = Callable[[int], None]
"""Called before a chunk is computed, with the position where it ends."""

BeforeToken = Callable[[int], None]
"""Called with each token that decoding is about to compute."""


def chunk_ends(begin: int, end: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Chunks `[b, e)` that cover `[begin, end)`; each ends at the next multiple of `block_size`, the last one at `end`."""
    while begin < end:
        stop = min(end, (begin // block_size + 1) * block_size)
        yield begin, stop
        begin = stop


class TokenCounter:
    """Counts the tokens that the model's embedding layer really sees. Owns one forward hook; `remove()` takes it out."""

    def __init__(self, model: nn.Module) -> None:
        self.total = 0
        embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
        self._handle = embedding.register_forward_hook(self._count)

    def _count(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG002
        self.total += int(args[0].numel())

    def remove(self) -> None:
        """Stops counting."""
        self._handle.remove()


@dataclass
class Generation:
    """What a greedy run produced. `logits`: [new tokens, vocabulary], float32, row i chose token i."""

    tokens: list[int] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


class Runner:
    """Runs one model on one sequence at a time, batch 1. Does not own the model. Not thread-safe.

    block_size: tokens; chunks end at its multiples.
    """

    def __init__(self, model: nn.Module, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.device = next(model.parameters()).device
        # Releases before 5.2x call the argument `past_key_values`.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def step(self, cache: DynamicCache, tokens: Sequence[int] | Tensor, keep: int = 1) -> Tensor:
        """One forward pass over `tokens`, appended to `cache`. Returns the logits of the last `keep` tokens (0: of all),
        [keep, vocabulary]."""
        ids = torch.as_tensor(tokens, dtype=torch.long, device=self.device)[None]
        output = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **{self._cache_argument: cache})
        logits: Tensor = output.logits[0]
        return logits

    def prefill(
        self,
        cache: DynamicCache,
        tokens: Sequence[int] | Tensor,
        begin: int,
        *,
        before_chunk: BeforeChunk | None = None,
        after_chunk: AfterPass | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Computes `tokens[begin:]` in block-aligned chunks; `cache` holds `tokens[:begin]`.

        Returns the logits of the last token, [1, vocabulary], or with `all_logits` of every computed one,
        [len(tokens) - begin, vocabulary]. ValueError if nothing is left to compute: logits come only from a computed token.
        """
        if begin >= len(tokens):
            raise ValueError(f"nothing to compute: {len(tokens)} tokens, {begin} already there")
        rows: list[Tensor] = []
        for start, stop in chunk_ends(begin, len(tokens), self.block_size):
            if before_chunk is not None:
                before_chunk(stop)
            rows.append(self.step(cache, tokens[start:stop], keep=0 if all_logits else 1))
            if after_chunk is not None:
                after_chunk(cache, stop)
        return torch.cat(rows) if all_logits else rows[-1]

    def decode(
        self,
        cache: DynamicCache,
        logits: Tensor,
        length: int,
        max_new_tokens: int,
        *,
        before_token: BeforeToken | None = None,
        after_token: AfterPass | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        forced: Sequence[int] | None = None,
    ) -> Generation:
        """Greedy decoding from `logits` ([n, vocabulary], last row: of the last of `length` tokens in `cache`).

        Ties between logits go to the lowest token id. The last chosen token is not computed, so `cache` ends up holding
        length + new - 1 tokens. `forced`: feed these tokens instead of the chosen ones (the choices are still returned).
        """
        result = Generation()
        rows = []
        logits = logits[-1]
        for n in range(max_new_tokens):
            chosen = int(torch.argmax(logits))
            result.tokens.append(chosen)
            rows.append(logits)
            fed = forced[n] if forced is not None else chosen
            if fed in stop_tokens or n + 1 == max_new_tokens:
                break
            if before_token is not None:
                before_token(fed)
            logits = self.step(cache, [fed])[-1]
            if after_token is not None:
                after_token(cache, length + n + 1)
        if rows:
            result.logits = torch.stack(rows).float().cpu()
        return result
