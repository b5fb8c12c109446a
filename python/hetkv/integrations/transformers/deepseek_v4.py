"""DeepSeek-V4: sliding windows on every layer; compressed entries, indexer keys, tails and overlaps on CSA and HCA layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .state import GroupState, Retention, Rows, StateAdapter, require_empty, stack_rows, window_slice

_CSA = "compressed_sparse_attention"
_HCA = "heavily_compressed_attention"


class DeepseekV4State(StateAdapter):
    """State of a `DeepseekV4ForCausalLM` cache.

    Per layer, after p tokens (c = head dim, c_I = indexer head dim, m = the layer's ratio):
    `keys` [1, 1, min(p, W-1), c] (on CSA and HCA layers `values` is the same tensor); `compressed_kv[name]` [1, floor(p/m), c];
    `buffer_kv/gate[name]` [1, p mod m, c or 2c]; CSA only: `overlap_kv/gate[name]` [1, m, c], None while p < m.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        types: list[str] = list(config.layer_types)
        csa = tuple(i for i, kind in enumerate(types) if kind == _CSA)
        hca = tuple(i for i, kind in enumerate(types) if kind == _HCA)
        every = tuple(range(len(types)))
        groups: list[GroupState] = []
        tails: list[GroupState] = []
        # Where each compressor keeps its state: group -> key of the layer's dictionaries.
        self._slot: dict[str, str] = {}
        if csa:
            m = int(config.compress_rates[_CSA])
            groups.append(GroupState("csa_kv", Retention.HISTORY, csa, ("kv",), ratio=m))
            groups.append(GroupState("csa_index", Retention.HISTORY, csa, ("key",), ratio=m))
            fields = ("kv", "gate", "overlap_kv", "overlap_gate")
            tails.append(GroupState("csa_tail", Retention.TAIL, csa, fields, ratio=m, overlap_rows=m))
            tails.append(GroupState("csa_index_tail", Retention.TAIL, csa, fields, ratio=m, overlap_rows=m))
            self._slot |= {"csa_kv": "compressor", "csa_index": "indexer"}
            self._slot |= {"csa_tail": "compressor", "csa_index_tail": "indexer"}
        if hca:
            m = int(config.compress_rates[_HCA])
            groups.append(GroupState("hca_kv", Retention.HISTORY, hca, ("kv",), ratio=m))
            tails.append(GroupState("hca_tail", Retention.TAIL, hca, ("kv", "gate"), ratio=m))
            self._slot |= {"hca_kv": "compressor", "hca_tail": "compressor"}
        groups.append(GroupState("swa", Retention.WINDOW, every, ("kv",), window=int(config.sliding_window)))
        self.groups = (*groups, *tails)
        super().__init__(config, dtype, device)

    def export_history(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        slot = self._slot[group.name]
        parts = [self._entries(cache.layers[i], slot)[begin:end] for i in group.layers]
        return {group.fields[0]: stack_rows(parts)}

    def export_window(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        length = self.length(cache)
        parts = [window_slice(cache.layers[i].keys[0, 0], length, begin, end) for i in group.layers]
        return {"kv": stack_rows(parts)}

    def export_tail(self, cache: DynamicCache, group: GroupState) -> Rows:
        slot = self._slot[group.name]
        layers = [cache.layers[i] for i in group.layers]
        rows = {
            "kv": stack_rows([layer.buffer_kv[slot][0] for layer in layers]),
            "gate": stack_rows([layer.buffer_gate[slot][0] for layer in layers]),
        }
        if group.overlap_rows and self.length(cache) >= group.ratio:
            rows["overlap_kv"] = stack_rows([layer.overlap_kv[slot][0] for layer in layers])
            rows["overlap_gate"] = stack_rows([layer.overlap_gate[slot][0] for layer in layers])
        return rows

    def fill(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        require_empty(cache)
        self._fill_windows(cache, position, state)
        for group in self.groups:
            if group.retention is Retention.HISTORY:
                self._fill_entries(cache, position, group, state)
            elif group.retention is Retention.TAIL:
                self._fill_tail(cache, position, group, state)

    def _fill_windows(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        group = self.group("swa")
        begin, end = group.need(position)
        rows = self._take(state, group, "kv", end - begin)
        for index, layer_rows in zip(group.layers, rows, strict=True):
            layer = cache.layers[index]
            keys = layer_rows.clone()[None, None]
            layer.lazy_initialization(keys, keys)
            layer.keys = keys
            layer.values = keys if hasattr(layer, "compressed_kv") else keys.clone()
            layer.cumulative_length = position

    def _fill_entries(self, cache: DynamicCache, position: int, group: GroupState, state: Mapping[str, Rows]) -> None:
        slot = self._slot[group.name]
        count = position // group.ratio
        rows = self._take(state, group, group.fields[0], count)
        for index, layer_rows in zip(group.layers, rows, strict=True):
            layer = cache.layers[index]
            layer.compressed_kv[slot] = layer_rows.clone()[None]
            layer.entry_count[slot] = count

    def _fill_tail(self, cache: DynamicCache, position: int, group: GroupState, state: Mapping[str, Rows]) -> None:
        slot = self._slot[group.name]
        count = position % group.ratio
        kv, gate = self._tail_rows(state, group, count)
        overlap: tuple[Tensor, Tensor] | None = None
        if group.overlap_rows and position >= group.ratio:
            overlap = (
                self._take(state, group, "overlap_kv", group.overlap_rows),
                self._take(state, group, "overlap_gate", group.overlap_rows),
            )
        for n, index in enumerate(group.layers):
            layer = cache.layers[index]
            layer.buffer_kv[slot] = kv[n].clone()[None]
            layer.buffer_gate[slot] = gate[n].clone()[None]
            if overlap is not None:
                layer.overlap_kv[slot] = overlap[0][n].clone()[None]
                layer.overlap_gate[slot] = overlap[1][n].clone()[None]

    def _tail_rows(self, state: Mapping[str, Rows], group: GroupState, count: int) -> tuple[Tensor, Tensor]:
        if count == 0:  # R(p) asks for no tail rows at aligned positions, so the state need not name them
            width = int(self.config.index_head_dim if self._slot[group.name] == "indexer" else self.config.head_dim)
            width *= 2 if group.overlap_rows else 1
            empty = torch.empty((len(group.layers), 0, width), dtype=self.dtype, device=self.device)
            return empty, empty
        return self._take(state, group, "kv", count), self._take(state, group, "gate", count)

    def _entries(self, layer: Any, slot: str) -> Tensor:
        entries: Tensor | None = layer.compressed_kv[slot]
        if entries is None:
            width = int(self.config.index_head_dim if slot == "indexer" else self.config.head_dim)
            return torch.empty((0, width), dtype=self.dtype, device=self.device)
        return entries[0]


__all__ = ["DeepseekV4State"]
