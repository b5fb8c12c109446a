"""Models whose layers hold plain keys and values: gpt-oss and Gemma 3 (windows, full layers), Qwen3-Next (full, GDN)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from .state import GroupState, Retention, Rows, StateAdapter, UnsupportedModelError, require_empty, stack_rows, window_slice

_FIELDS = ("k", "v")


def layers_of(config: Any, layer_type: str) -> tuple[int, ...]:
    """Indices of the layers of one `layer_types` value, ascending."""
    return tuple(i for i, kind in enumerate(config.layer_types) if kind == layer_type)


def _export(cache: DynamicCache, group: GroupState, rows_of: Any) -> Rows:
    """`rows_of` cuts `[rows, heads, dim]`; keys and values lie as [1, heads, rows, dim] in transformers."""
    layers = [cache.layers[i] for i in group.layers]
    return {
        "k": stack_rows([rows_of(layer.keys[0].transpose(0, 1)) for layer in layers]),
        "v": stack_rows([rows_of(layer.values[0].transpose(0, 1)) for layer in layers]),
    }


class KeyValueState(StateAdapter):
    """Full layers (`full`) and sliding-window layers (`swa`), fields `k` and `v` of shape [heads, dim] a token."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        known = {"full_attention", "sliding_attention"}
        if unknown := set(config.layer_types) - known:
            raise UnsupportedModelError(f"{config.model_type}: layer types {sorted(unknown)} are not served")
        self.groups = self._groups(config)
        super().__init__(config, dtype, device)

    @staticmethod
    def _groups(config: Any) -> tuple[GroupState, ...]:
        groups = []
        if full := layers_of(config, "full_attention"):
            groups.append(GroupState("full", Retention.HISTORY, full, _FIELDS))
        if swa := layers_of(config, "sliding_attention"):
            groups.append(GroupState("swa", Retention.WINDOW, swa, _FIELDS, window=int(config.sliding_window)))
        return tuple(groups)

    def export_history(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        return _export(cache, group, lambda rows: rows[begin:end])

    def export_window(self, cache: DynamicCache, group: GroupState, begin: int, end: int) -> Rows:
        length = self.length(cache)
        return _export(cache, group, lambda rows: window_slice(rows, length, begin, end))

    def fill(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        require_empty(cache)
        for group in self.groups:
            if group.retention in (Retention.HISTORY, Retention.WINDOW):
                self._fill_keys(cache, position, group, state)

    def _fill_keys(self, cache: DynamicCache, position: int, group: GroupState, state: Mapping[str, Rows]) -> None:
        begin, end = group.need(position)
        keys = self._take(state, group, "k", end - begin)
        values = self._take(state, group, "v", end - begin)
        for n, index in enumerate(group.layers):
            layer = cache.layers[index]
            layer_keys, layer_values = self._lay(keys[n]), self._lay(values[n])
            layer.lazy_initialization(layer_keys, layer_values)
            layer.keys, layer.values = layer_keys, layer_values
            if group.retention is Retention.WINDOW:
                layer.cumulative_length = position

    @staticmethod
    def _lay(rows: Tensor) -> Tensor:
        """[rows, heads, dim] to a fresh contiguous [1, heads, rows, dim]."""
        return rows.transpose(0, 1).clone(memory_format=torch.contiguous_format)[None]


class Qwen3NextState(KeyValueState):
    """Full layers as in `KeyValueState`; gated delta-rule layers (`gdn`) as one snapshot: `conv` [channels, kernel], `recurrent`.

    A snapshot exists only at the position where it was saved; nothing shorter can be cut from it.
    """

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        gdn = layers_of(config, "linear_attention")
        full = layers_of(config, "full_attention")
        if unknown := set(config.layer_types) - {"linear_attention", "full_attention"}:
            raise UnsupportedModelError(f"{config.model_type}: layer types {sorted(unknown)} are not served")
        if not full or not gdn:
            raise UnsupportedModelError(f"{config.model_type}: needs both full and linear layers, has {config.layer_types}")
        self.groups = (
            GroupState("full", Retention.HISTORY, full, _FIELDS),
            GroupState("gdn", Retention.SNAPSHOT, gdn, ("conv", "recurrent")),
        )
        StateAdapter.__init__(self, config, dtype, device)

    def export_snapshot(self, cache: DynamicCache, group: GroupState) -> Rows:
        layers = [cache.layers[i] for i in group.layers]
        return {
            "conv": stack_rows([layer.conv_states[0] for layer in layers]),
            "recurrent": stack_rows([layer.recurrent_states[0] for layer in layers]),
        }

    def fill(self, cache: DynamicCache, position: int, state: Mapping[str, Rows]) -> None:
        super().fill(cache, position, state)
        group = self.group("gdn")
        conv = self._take(state, group, "conv", 1)
        recurrent = self._take(state, group, "recurrent", 1)
        for n, index in enumerate(group.layers):
            layer = cache.layers[index]
            layer.lazy_initialization(conv_states=conv[n], conv_kernel_size=int(self.config.linear_conv_kernel_dim))
            layer.lazy_initialization(recurrent_states=recurrent[n])
            layer.conv_states[0].copy_(conv[n])
            layer.recurrent_states[0].copy_(recurrent[n])
            layer.has_previous_state[0] = True
