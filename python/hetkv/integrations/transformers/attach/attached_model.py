"""`attach`: a transformers model computes on the blocks of a hetkv cache, many requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .... import AdmissionError, StepBuffers, ops
from ..attention_abi import ATTENTION_FAMILY, ON_BLOCKS, STOCK, check_attention
from ..families import adapter_for
from ..prefix_cache import check_layout
from ..schedule import Generation
from ..state import UnsupportedModelError
from ..tie_rule import ABI_FAMILY, LOWEST_INDEX
from .compiled_decode import CompiledDecode
from .deepseek_v4 import AttachedDeepseekV4
from .family import AttachedFamily
from .key_value import ATTENTION_NAME, AttachedKeyValue
from .paged_cache import PagedCache
from .rings import Rings

if TYPE_CHECKING:
    from .... import Cache, HashedPrefix, HitReport, Namespace, Sequence, StepStamp

_FAMILIES: dict[str, type[AttachedFamily]] = {
    "deepseek_v4": AttachedDeepseekV4,
    "gpt_oss": AttachedKeyValue,
    "gemma3_text": AttachedKeyValue,
}
_MARK = "hetkv_attached"


class AttachedRequest:
    """One running request of an attached model. Owns its hetkv sequence; `close` (or a `with` block) gives it back.

    cache: the object for `cache=` when the request runs alone (`model.generate(ids, cache=request.cache)`). length: tokens
    computed so far. tokens: all known ones.
    """

    def __init__(self, attached: AttachedModel, sequence: Sequence, tokens: list[int]) -> None:
        self._attached = attached
        self.sequence = sequence
        self.tokens = list(tokens)
        self.prompt_tokens = len(tokens)
        self.length = int(sequence.num_computed_tokens)
        self.cache = PagedCache(attached, (self,))
        self._open = True

    @property
    def report(self) -> HitReport:
        """What could be resumed, and why the rest could not."""
        return self.sequence.report

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that are resumed; the first step starts here."""
        return int(self.sequence.num_computed_tokens)

    def append(self, tokens: SequenceOf[int]) -> None:
        """Tokens chosen after the prompt become known; a step can compute them."""
        self.sequence.append(list(tokens))
        self.tokens.extend(tokens)

    def next_chunk(self, most: int) -> int:
        """Tokens of the next step: known, not computed, at most `most`, and not past the next multiple of block_size."""
        block = self._attached.block_size
        boundary = (self.length // block + 1) * block
        return min(len(self.tokens), boundary, self.length + most) - self.length

    def close(self, *, turn_end: bool = True) -> None:
        """Ends the request. `turn_end`: publish the checkpoints of the end of a turn. Idempotent."""
        if self._open:
            self._open = False
            self._attached.forget((self,))  # a pass that raised may have left its step behind
            self.sequence.free(turn_end=turn_end)

    def __enter__(self) -> AttachedRequest:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(turn_end=kind is None)


@dataclass(frozen=True)
class Step:
    """One forward pass of several requests in packed form. inputs: keywords for the model. last: rows of the last tokens."""

    requests: tuple[AttachedRequest, ...]
    inputs: Mapping[str, Any]
    last: Tensor  # int64 [requests]


class AttachedModel:
    """A model whose attention runs on the blocks of one hetkv cache; made by `attach`, undone by `detach`.

    Keys, values, entries and tails are written into blocks and read there: a hit costs no copy of the history, and one step may
    mix requests of any length and any hit, prefill chunks and decoding. Owns the step's tables and two hooks on the model. Model
    and cache must outlive it. One thread at a time.
    """

    def __init__(
        self, model: nn.Module, cache: Cache, *, max_sequences: int, max_tokens: int, max_sequence_tokens: int | None
    ) -> None:
        adapter = adapter_for(model)
        config = adapter.config
        family = _FAMILIES.get(config.model_type)
        if family is None:
            known = ", ".join(sorted(_FAMILIES))
            raise UnsupportedModelError(f"model type {config.model_type!r} cannot be attached; can be: {known}")
        if getattr(model, _MARK, None) is not None:
            raise UnsupportedModelError("the model is attached already; call detach first")
        check_layout(adapter, cache)
        self.model = model
        self.cache = cache
        self.block_size = int(cache.layout.block_size)
        self.device = adapter.device
        self.max_tokens = max_tokens
        limit = max_sequence_tokens or int(config.max_position_embeddings)
        self._max_sequence_tokens = limit
        self._buffers = StepBuffers(cache, max_sequences, max_tokens, limit)
        self.family: AttachedFamily = family(model, cache)
        self._rings = Rings(cache, self.family.ring_biases)
        for abi_family, value in self._abi().items():
            cache.set_abi(abi_family, value)
        self._stock_attention: str = model.config._attn_implementation  # type: ignore[union-attr,assignment]
        self.family.install()
        _set_attention(model, ATTENTION_NAME)
        setattr(model, _MARK, self)
        self._handles = [
            model.register_forward_pre_hook(self._before_pass, with_kwargs=True),
            model.register_forward_hook(self._after_pass, with_kwargs=True),
        ]
        self._stamps: dict[AttachedRequest, StepStamp] = {}
        self._saved: dict[AttachedRequest, list[tuple[Tensor, Tensor]]] = {}  # rings before the step

    def _abi(self) -> dict[str, int]:
        """What the bits of rows depend on beside the model: whose attention, at which level of the CPU, with which tie rule."""
        abi = {ATTENTION_FAMILY: ON_BLOCKS}
        if self.device.type == "cpu":
            abi["cpu_level"] = ops.CPU_LEVELS.index(ops.cpu_level())
        if any(group.spec.indexes for group in self.cache.layout.groups):
            abi[ABI_FAMILY] = LOWEST_INDEX
        return abi

    def open(
        self,
        tokens: SequenceOf[int] | Tensor,
        *,
        max_new_tokens: int = 0,
        namespace: Namespace | None = None,
        previous: HashedPrefix | None = None,
    ) -> AttachedRequest:
        """Admits a request: pins what it resumes from, reserves the rest, and fills its running rings.

        tokens: the whole prompt, [n] or [1, n]. AdmissionError if the memory is short, then nothing changed.
        """
        ids = [int(token) for token in (tokens.reshape(-1).tolist() if isinstance(tokens, Tensor) else tokens)]
        if not ids:
            raise ValueError("an empty prompt has nothing to compute")
        if len(ids) + max_new_tokens > self._max_sequence_tokens:
            raise ValueError(
                f"{len(ids)} prompt tokens and max_new_tokens = {max_new_tokens}: expected at most "
                f"{self._max_sequence_tokens} together (max_sequence_tokens)"
            )
        check_attention(self.cache, ON_BLOCKS)
        sequence = self.cache.admit(
            ids,
            namespace,
            max_new_tokens=max_new_tokens,
            chunk_tokens=self.max_tokens,
            live_state=True,
            previous=previous,
        )
        try:
            self._rings.restore(sequence, int(sequence.num_computed_tokens))
            return AttachedRequest(self, sequence, ids)
        except BaseException:
            sequence.free(turn_end=False)
            raise

    @contextmanager
    def step(self, requests: SequenceOf[AttachedRequest], num_tokens: SequenceOf[int]) -> Iterator[Step]:
        """Prepares one packed pass: `with attached.step(requests, counts) as step: out = model(**step.inputs)`.

        num_tokens: known, uncomputed tokens of each request. On leaving, the rows are settled, and whole blocks published. If the
        body raised, the step is forgotten: its tokens can be scheduled again.
        """
        requests = tuple(requests)
        counts = [int(count) for count in num_tokens]
        cache = PagedCache(self, requests, in_step=True)
        ids = [request.tokens[request.length : request.length + n] for request, n in zip(requests, counts, strict=True)]
        positions = [torch.arange(r.length, r.length + n) for r, n in zip(requests, counts, strict=True)]
        self._prepare(cache, counts)
        packed = torch.tensor([token for part in ids for token in part], dtype=torch.long, device=self.device)
        inputs = {
            "input_ids": packed[None],
            "position_ids": torch.cat(positions).to(self.device)[None],
            "cache": cache,
            "use_cache": True,
        }
        last = torch.tensor(counts, device=self.device).cumsum(0) - 1
        try:
            yield Step(requests, inputs, last)
        except BaseException:
            self.forget(requests)
            raise
        finally:
            cache.ready = False
        self.settle(requests, counts)

    def run(self, requests: SequenceOf[AttachedRequest], num_tokens: SequenceOf[int]) -> Tensor:
        """One packed pass. Returns the logits of the last token of each request, [requests, vocabulary]."""
        with torch.no_grad(), self.step(requests, num_tokens) as step:
            logits: Tensor = self.model(**step.inputs, logits_to_keep=step.last).logits[0]
        return logits

    def compile_decode(self, batch: int, *, backend: str | Callable[..., Any] = "inductor") -> CompiledDecode:
        """A graph of one decode step of up to `batch` requests. It is compiled at its first run, and holds for all lengths.

        A model with experts must use an implementation of fixed shapes: `model.set_experts_implementation("batched_mm")`.
        """
        return CompiledDecode(self, batch, self._max_sequence_tokens, backend)

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        max_new_tokens: int,
        *,
        namespace: Namespace | None = None,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> list[Generation]:
        """Greedy decoding of all prompts at once: a step mixes prefill chunks and decoding, and requests wait for memory.

        Ties between logits go to the lowest token id. Generation.logits: float32, row i chose token i. AdmissionError if a prompt
        cannot fit even alone.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens = {max_new_tokens}: expected at least 1")
        waiting = list(reversed(list(enumerate(prompts))))
        running: dict[AttachedRequest, int] = {}
        results = [Generation() for _ in prompts]
        rows: list[list[Tensor]] = [[] for _ in prompts]
        try:
            while waiting or running:
                self._admit_waiting(waiting, running, max_new_tokens, namespace)
                requests, counts = self._share(running)
                logits = self.run(requests, counts)
                for request, row in zip(requests, logits, strict=True):
                    if request.length < len(request.tokens):
                        continue
                    index = running[request]
                    chosen = int(torch.argmax(row))
                    results[index].tokens.append(chosen)
                    rows[index].append(row.float().cpu())
                    if chosen in stop_tokens or len(results[index].tokens) == max_new_tokens:
                        del running[request]
                        request.close()
                    else:
                        request.append([chosen])
        finally:
            for request in running:
                request.close(turn_end=False)
        for result, logit_rows in zip(results, rows, strict=True):
            result.logits = torch.stack(logit_rows)
        return results

    def _admit_waiting(
        self,
        waiting: list[tuple[int, SequenceOf[int]]],
        running: dict[AttachedRequest, int],
        max_new_tokens: int,
        namespace: Namespace | None,
    ) -> None:
        while waiting and len(running) < self._buffers.max_sequences:
            index, prompt = waiting[-1]
            try:
                request = self.open(prompt, max_new_tokens=max_new_tokens, namespace=namespace)
            except AdmissionError:
                if not running:
                    raise
                return
            running[request] = index
            waiting.pop()

    def _share(self, running: Mapping[AttachedRequest, int]) -> tuple[list[AttachedRequest], list[int]]:
        """Who computes how many tokens in the next step: oldest first, while the step has room."""
        requests, counts, room = [], [], self.max_tokens
        for request in running:
            count = request.next_chunk(room)
            if count > 0:
                requests.append(request)
                counts.append(count)
                room -= count
            if room == 0:
                break
        return requests, counts

    # --- what every pass goes through ---

    def schedule(
        self, requests: tuple[AttachedRequest, ...], counts: list[int], buffers: StepBuffers, *, padded: int | None = None
    ) -> None:
        """Fills `buffers` for a step, which `settle` or `forget` must end. padded: sequences and tokens to fill, if any more."""
        self.forget(requests)  # a pass that raised left its step behind
        sequences = [request.sequence for request in requests]
        stamps = self.cache.prepare_step(
            sequences, counts, buffers, padded_sequences=padded or len(counts), padded_tokens=padded or sum(counts)
        )
        self._stamps.update(zip(requests, stamps, strict=True))
        for request, count in zip(requests, counts, strict=True):
            if count > 1:  # the row of one token replaces a row that no window reads any more; a pass that raised can run again
                self._saved[request] = self._rings.save(request.sequence)

    def _prepare(self, cache: PagedCache, counts: list[int]) -> None:
        buffers, tokens, batch = self._buffers, sum(counts), len(counts)
        self.schedule(cache.requests, counts, buffers)
        cache.num_tokens = counts
        cache.block_tables = {name: table[:batch].to(self.device) for name, table in buffers.block_tables.items()}
        cache.slots = {name: slots[:tokens].to(self.device) for name, slots in buffers.slots.items()}
        cache.cu_seqlens_q = buffers.cu_seqlens_q[: batch + 1].to(self.device)
        cache.seqused_k = buffers.seqused_k[:batch].to(self.device)
        cache.ready = True

    def settle(self, requests: tuple[AttachedRequest, ...], counts: list[int]) -> None:
        """The rows of a step are written: they count, and whole blocks are published with the points that are due."""
        for request, count in zip(requests, counts, strict=True):
            alone = len(requests) == 1  # a matrix product over more rows rounds otherwise
            request.sequence.settle(self._stamps.pop(request), batch_invariant=alone)
            self._saved.pop(request, None)
            begin, request.length = request.length, request.length + count
            if request.length // self.block_size == begin // self.block_size:
                continue
            if request.length % self.block_size == 0:
                self._store_point(request)
            request.sequence.publish(request.length // self.block_size * self.block_size)

    def _store_point(self, request: AttachedRequest) -> None:
        staged = request.sequence.stage_point(request.length)
        if staged:
            self._rings.store(request.sequence, request.length, staged)
            request.sequence.commit_point(request.length, dict.fromkeys(staged, request.length))

    def forget(self, requests: tuple[AttachedRequest, ...]) -> None:
        """A step did not run, or not to its end: its tokens can be scheduled again, and rings hold what they held before."""
        for request in requests:
            request.cache.ready = False
            saved = self._saved.pop(request, [])
            if self._stamps.pop(request, None) is not None and request.sequence.live:
                request.sequence.restart_from_settled()
                self._rings.put_back(saved)

    # --- passes that did not come from `step`: model(ids, cache=request.cache), model.generate ---

    def _before_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if torch.compiler.is_compiling() or not isinstance(cache, PagedCache) or cache.in_step:
            return
        if cache.attached is not self:
            raise UnsupportedModelError("the cache belongs to another attached model")
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is None:
            raise UnsupportedModelError("the pass has no input_ids; embeddings do not identify a prefix")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            raise UnsupportedModelError("only masks of tokens, [batch, tokens]; attention on blocks is causal")
        if mask is not None and not bool(mask.all()):
            raise UnsupportedModelError("the attention mask has holes; give ragged batches in packed form")
        if ids.shape[0] != len(cache.requests):
            raise UnsupportedModelError(f"input_ids has {ids.shape[0]} rows, the cache {len(cache.requests)} requests")
        positions = kwargs.get("position_ids", args[2] if len(args) > 2 else None)
        if positions is not None:
            begin = torch.tensor([[request.length] for request in cache.requests], device=positions.device)
            expected = begin + torch.arange(ids.shape[1], device=positions.device)
            if positions.shape[-1:] != expected.shape[-1:] or not bool((positions == expected).all()):
                raise UnsupportedModelError("the pass has position_ids other than those that follow the computed tokens")
        for request, row in zip(cache.requests, ids.tolist(), strict=True):
            self._check_tokens(request, row)
        self._prepare(cache, [ids.shape[1]] * ids.shape[0])

    @staticmethod
    def _check_tokens(request: AttachedRequest, new: list[int]) -> None:
        known = request.tokens[request.length : request.length + len(new)]
        if new[: len(known)] != known:
            raise ValueError(f"the pass computes other tokens than the request has, from token {request.length} on")
        if len(new) > len(known):
            request.append(new[len(known) :])

    def _after_pass(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG002
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if torch.compiler.is_compiling() or not isinstance(cache, PagedCache) or cache.in_step:
            return
        cache.ready = False
        self.settle(cache.requests, cache.num_tokens)

    def detach(self) -> None:
        """Gives the model its own attention back. Requests must be closed first. Idempotent."""
        if getattr(self.model, _MARK, None) is not self:
            return
        for handle in self._handles:
            handle.remove()
        self.family.remove()
        _set_attention(self.model, self._stock_attention)
        if self.cache.abi.get(ATTENTION_FAMILY) == ON_BLOCKS:
            self.cache.set_abi(ATTENTION_FAMILY, STOCK)
        delattr(self.model, _MARK)


def attach(
    model: nn.Module,
    cache: Cache,
    *,
    max_sequences: int = 8,
    max_tokens: int = 512,
    max_sequence_tokens: int | None = None,
) -> AttachedModel:
    """Makes `model` compute its attention on the blocks of `cache`.

    model: a `DeepseekV4ForCausalLM`, `GptOssForCausalLM` or `Gemma3ForCausalLM` in evaluation mode. cache: made from the same
    config in the model's dtype. max_sequences, max_tokens: of one step. max_sequence_tokens: longest sequence; None: what the
    model's position embeddings allow.

    UnsupportedModelError if the model cannot be served, is attached already, or does not fit the cache.
    """
    return AttachedModel(
        model, cache, max_sequences=max_sequences, max_tokens=max_tokens, max_sequence_tokens=max_sequence_tokens
    )


def detach(model: nn.Module) -> None:
    """Undoes `attach`. UnsupportedModelError if the model is not attached."""
    attached: AttachedModel | None = getattr(model, _MARK, None)
    if attached is None:
        raise UnsupportedModelError("the model is not attached")
    attached.detach()


def _set_attention(model: nn.Module, name: str) -> None:
    config: Any = model.config
    for one in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
        one._attn_implementation = name
