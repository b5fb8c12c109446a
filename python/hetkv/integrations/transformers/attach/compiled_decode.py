"""One decode step of a padded batch as a compiled graph: fixed addresses, lengths in tensors, no recompilation between steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .... import StepBuffers
from .paged_cache import PagedCache

if TYPE_CHECKING:
    from .attached_model import AttachedModel, AttachedRequest


class CompiledDecode:
    """Runs one token of up to `batch` requests through a graph that `torch.compile(fullgraph=True)` made of the whole model.

    Made by `AttachedModel.compile_decode`. Owns the tensors that the graph reads. Padding rows are no tokens of a sequence:
    their slots and tables point at scratch blocks, their logits mean nothing and are not returned.
    """

    def __init__(self, attached: AttachedModel, batch: int, max_sequence_tokens: int, backend: str | Callable[..., Any]) -> None:
        self._attached = attached
        self._buffers = StepBuffers(attached.cache, batch, batch, max_sequence_tokens)
        self.batch = batch
        device = attached.device
        self._cache = PagedCache(attached, (), in_step=True)
        self._cache.ready = True  # run() prepares every pass of the graph
        self._cache.block_tables = {name: table.to(device) for name, table in self._buffers.block_tables.items()}
        self._cache.slots = {name: slots.to(device) for name, slots in self._buffers.slots.items()}
        self._cache.cu_seqlens_q = self._buffers.cu_seqlens_q.to(device)
        self._cache.seqused_k = self._buffers.seqused_k.to(device)
        self._ids = torch.zeros((1, batch), dtype=torch.long, device=device)
        self._positions = torch.zeros((1, batch), dtype=torch.long, device=device)
        self._graph: Callable[[Tensor, Tensor], Tensor] = torch.compile(
            self._forward, fullgraph=True, dynamic=False, backend=backend
        )

    def run(self, requests: SequenceOf[AttachedRequest]) -> Tensor:
        """Computes the next known token of each request. Returns its logits, [requests, vocabulary].

        ValueError for more requests than `batch`, or one without an uncomputed token.
        """
        requests = tuple(requests)
        if not 0 < len(requests) <= self.batch:
            raise ValueError(f"{len(requests)} requests for a graph of {self.batch}")
        counts = [1] * len(requests)
        self._attached.schedule(requests, counts, self._buffers, padded=self.batch)
        self._copy_tables()
        for n, request in enumerate(requests):
            self._ids[0, n] = request.tokens[request.length]
            self._positions[0, n] = request.length
        try:
            with torch.no_grad():
                logits = self._graph(self._ids, self._positions)
        except BaseException:
            self._attached.forget(requests)
            raise
        self._attached.settle(requests, counts)
        return logits[: len(requests)]

    def _copy_tables(self) -> None:
        """On the CPU the graph reads the buffers themselves; on a device their fixed copies."""
        if self._attached.device.type == "cpu":
            return
        for name, table in self._buffers.block_tables.items():
            self._cache.block_tables[name].copy_(table, non_blocking=True)
            self._cache.slots[name].copy_(self._buffers.slots[name], non_blocking=True)
        self._cache.cu_seqlens_q.copy_(self._buffers.cu_seqlens_q, non_blocking=True)
        self._cache.seqused_k.copy_(self._buffers.seqused_k, non_blocking=True)

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        model: Any = self._attached.model
        logits: Tensor = model.forward(input_ids=ids, position_ids=positions, cache=self._cache, use_cache=True).logits[0]
        return logits
