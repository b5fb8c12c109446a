"""One request on one model: admitted, restored, computed, written back and published.

A session watches the model's forward passes by hooks, so every way to run the model — `Session.generate`, `model(...)`,
`model.generate(...)` with `session.cache` — leaves the same rows in hetkv.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, StaticCache

from .rows import RowStore
from .schedule import Generation, Runner
from .state import StateAdapter, UnsupportedModelError

if TYPE_CHECKING:
    from ... import Cache, HitReport, Sequence


class Session:
    """A running request and the transformers cache that belongs to it.

    Owns the hetkv sequence, the `DynamicCache` in `cache` (filled with the restored prefix) and two hooks on the model; gives
    up all of it in `close`. Neither model nor hetkv cache may go away before that. One thread at a time.

    Rules for whoever runs the model: batch 1, no padding, and no forward pass across a multiple of `block_size`
    (`generate(..., prefill_chunk_size=block_size)` keeps to it). Breaking one raises UnsupportedModelError before anything is
    computed.
    """

    def __init__(self, model: nn.Module, adapter: StateAdapter, store: Cache, sequence: Sequence, tokens: list[int]) -> None:
        self._model = model
        self._adapter = adapter
        self._sequence: Sequence = sequence
        self._rows = RowStore(adapter, store, sequence)
        self._runner = Runner(model, store.layout.block_size)
        self._block_size = int(store.layout.block_size)
        self._tokens = list(tokens)
        self._prompt_length = len(tokens)
        self._stamps: list[Any] = []
        self._length = self._written = int(sequence.num_computed_tokens)
        self._open = True
        self.cache: DynamicCache = self._rows.restore(self._length)
        # Named here because a hook sees the call's keywords only.
        self._handles = [
            model.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            model.register_forward_hook(self._after_pass, with_kwargs=True),
        ]

    @property
    def report(self) -> HitReport:
        """What could be resumed, and why the rest could not."""
        return self._sequence.report

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that were restored. The first forward pass starts here."""
        return int(self._sequence.num_computed_tokens)

    @property
    def length(self) -> int:
        """Tokens that `cache` holds now."""
        return self._length

    def prefill(self, *, all_logits: bool = False) -> Tensor:
        """Computes the rest of the prompt in block-aligned chunks.

        Returns the logits of the last token, [1, vocabulary], or of every token computed, [n, vocabulary].
        """
        return self._runner.prefill(self.cache, self._tokens[: self._prompt_length], self._length, all_logits=all_logits)

    def decode(
        self,
        logits: Tensor,
        max_new_tokens: int,
        *,
        stop_tokens: frozenset[int] = frozenset(),
        forced: SequenceOf[int] | None = None,
    ) -> Generation:
        """Greedy decoding after `prefill`, whose logits it takes. See `Runner.decode`."""
        return self._runner.decode(self.cache, logits, self._length, max_new_tokens, stop_tokens=stop_tokens, forced=forced)

    def generate(self, max_new_tokens: int, *, stop_tokens: frozenset[int] = frozenset()) -> Generation:
        """`prefill`, then `decode`."""
        return self.decode(self.prefill(), max_new_tokens, stop_tokens=stop_tokens)

    def close(self, *, turn_end: bool = True) -> None:
        """Ends the request and gives its memory back. `turn_end`: publish the checkpoints of the end of a turn. Idempotent."""
        if not self._open:
            return
        self._open = False
        for handle in self._handles:
            handle.remove()
        self._sequence.free(turn_end=turn_end)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(turn_end=kind is None)

    # --- hooks ---

    def _before_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        passed = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(passed, StaticCache):
            raise UnsupportedModelError("a static cache has no room for compressor state; pass the session's cache")
        if passed is not self.cache:
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise UnsupportedModelError("the pass has no input_ids; embeddings do not identify a prefix")
        self._check_shape(ids, kwargs)
        new = ids[0].tolist()
        self._check_tokens(new)
        self._stamps.append(self._sequence.schedule(self._length + len(new)))

    def _check_shape(self, ids: Tensor, kwargs: dict[str, Any]) -> None:
        if ids.shape[0] != 1:
            raise UnsupportedModelError(f"batch of {ids.shape[0]}; a session serves one sequence")
        held = self._adapter.length(self.cache)
        if held != self._length:
            raise UnsupportedModelError(
                f"the cache holds {held} tokens, the session computed {self._length}: it was cropped, reset or used elsewhere"
            )
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise UnsupportedModelError("the attention mask has holes; padding would enter the compressed entries")
        positions = kwargs.get("position_ids")
        if isinstance(positions, Tensor) and int(positions.reshape(-1)[0]) != self._length:
            first = int(positions.reshape(-1)[0])
            raise UnsupportedModelError(f"position {first} given for token {self._length}; is there padding?")
        end = self._length + ids.shape[1]
        boundary = (self._length // self._block_size + 1) * self._block_size
        if end > boundary:
            raise UnsupportedModelError(
                f"a pass over tokens [{self._length}, {end}) crosses the block boundary {boundary}; "
                f"chunks end at multiples of {self._block_size} (generate: prefill_chunk_size={self._block_size})"
            )

    def _check_tokens(self, new: list[int]) -> None:
        """The pass computes the admitted tokens; tokens past them are appended to the sequence."""
        known = self._tokens[self._length : self._length + len(new)]
        if new[: len(known)] != known:
            raise ValueError(f"the pass computes other tokens than the request was admitted with, from token {self._length} on")
        if len(new) > len(known):
            self._sequence.append(new[len(known) :])
            self._tokens.extend(new[len(known) :])

    def _after_pass(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        if kwargs.get("cache", kwargs.get("past_key_values")) is not self.cache:
            return
        self._length = self._adapter.length(self.cache)
        if self._length % self._block_size == 0:
            self._write_block()

    def _write_block(self) -> None:
        """The cache stands at a block boundary: its new rows go to the arena, then the block is published."""
        self._rows.write(self.cache, self._written, self._length)
        for stamp in self._stamps:
            self._sequence.settle(stamp)
        self._stamps.clear()
        self._rows.write_point(self.cache, self._length)
        self._sequence.publish(self._length)
        self._written = self._length
