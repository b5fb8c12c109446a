"""DeepSeek-V3.2: every layer keeps a latent row, a rotated key row and an indexer key per token. All of it is history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from .state import GroupState, Retention, Rows, StateAdapter, require_empty, stack_rows


class DeepseekV32State(StateAdapter):
    """`latent`: `keys` [kv_lora_rank] (normed latent) and `values` [rope dim] (the rotated key, not V); `index`: `key` [c_I].

    transformers lays latents as [1, 1, p, dim] and indexer keys as [1, p, dim].
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        every = tuple(range(int(config.num_hidden_layers)))
        self.groups = (
            GroupState("latent", Retention.HISTORY, every, ("keys", "values")),
            GroupState("index", Retention.HISTORY, every, ("key",)),
        )
        super().__init__(config, dtype, device)

    def export_history(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        layers = [cache.layers[i] for i in group.layers]
        if group.name == "index":
            return {"key": stack_rows([layer.indexer_keys[0, begin:end] for layer in layers])}
        return {
            "keys": stack_rows([layer.keys[0, 0, begin:end] for layer in layers]),
            "values": stack_rows([layer.values[0, 0, begin:end] for layer in layers]),
        }

    def fill(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        require_empty(cache)
        latent, index = self.group("latent"), self.group("index")
        keys = self._take(state, latent, "keys", position)
        values = self._take(state, latent, "values", position)
        indexer = self._take(state, index, "key", position)
        for n, number in enumerate(latent.layers):
            layer = cache.layers[number]
            layer_keys, layer_values = keys[n].clone()[None, None], values[n].clone()[None, None]
            layer.lazy_initialization(layer_keys, layer_values)
            layer.keys, layer.values = layer_keys, layer_values
            layer_index = indexer[n].clone()[None]
            layer.lazy_initialization_indexer(layer_index)
            layer.indexer_keys = layer_index
