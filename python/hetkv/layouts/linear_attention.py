"""Qwen3-Next and Kimi Linear: a recurrent state on most layers, attention over the whole prefix on the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._core import DType, FieldSpec, GroupSpec, ObjectKind, Retention
from .deepseek_v32 import latent_group
from .key_value import full_group
from .model_config import ModelConfig, layers_of

_FULL = "full_attention"
_LINEAR = "linear_attention"


def qwen3_next_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `Qwen3NextForCausalLM` cache: `full`, and `gdn`, the state of the gated delta net at one position.

    `gdn`: conv [2 * key heads * key dim + value heads * value dim, kernel], the last inputs of the convolution; recurrent
    [value heads, key dim, value dim], always float32. Older checkpoints write `full_attention_interval` n instead of
    `layer_types`: every n-th layer is full.
    """
    derived: list[str] | None = None
    if config.get("full_attention_interval") is not None:
        period = config.integer("full_attention_interval")
        derived = [_LINEAR if (layer + 1) % period else _FULL for layer in range(config.integer("num_hidden_layers"))]
    types = config.layer_types((_FULL, _LINEAR), derived)
    groups = []
    if full := layers_of(types, _FULL):
        groups.append(full_group(config, full, dtype))
    if linear := layers_of(types, _LINEAR):
        key_dim, value_dim = config.integer("linear_key_head_dim"), config.integer("linear_value_head_dim")
        key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        kernel = config.integer("linear_conv_kernel_dim")
        groups.append(_delta_net("gdn", linear, dtype, [channels, kernel], [value_heads, key_dim, value_dim]))
    return groups


def kimi_linear_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `KimiLinearForCausalLM` cache: `latent`, and `kda`, the state of Kimi's delta attention at one position.

    `latent`: as in DeepSeek-V3.2, without an indexer. `kda`: conv [3 * heads * dim, kernel]; recurrent [heads, dim, dim],
    always float32. Checkpoints write the layer map and the sizes into `linear_attn_config`.
    """
    nested = config.get("linear_attn_config")
    nested = nested if isinstance(nested, Mapping) else {}
    types = config.layer_types((_FULL, _LINEAR), _types_from_lists(config, nested))
    groups = []
    if full := layers_of(types, _FULL):
        groups.append(latent_group(config, full, dtype))
    if linear := layers_of(types, _LINEAR):

        def size(name: str, nested_name: str) -> int:
            if nested_name in nested:
                return config.checked_integer(f"linear_attn_config[{nested_name!r}]", nested[nested_name])
            return config.integer(name)

        heads, dim = size("linear_num_heads", "num_heads"), size("linear_head_dim", "head_dim")
        kernel = size("linear_conv_kernel_dim", "short_conv_kernel_size")
        groups.append(_delta_net("kda", linear, dtype, [3 * heads * dim, kernel], [heads, dim, dim]))
    return groups


def _delta_net(name: str, layers: list[int], dtype: DType, conv: list[int], recurrent: list[int]) -> GroupSpec:
    return GroupSpec(
        name,
        ObjectKind.recurrent_state,
        Retention.snapshot,
        owner_layers=layers,
        # The recurrence is computed and kept in float32 whatever the model's dtype.
        fields=[FieldSpec("conv", dtype, conv), FieldSpec("recurrent", DType.float32, recurrent)],
    )


def _types_from_lists(config: ModelConfig, nested: Mapping[str, Any]) -> list[str] | None:
    """Layer types from the lists of layer numbers (the first is 1) in `linear_attn_config`."""
    if "full_attn_layers" not in nested or "kda_layers" not in nested:
        return None
    numbers = dict.fromkeys(nested["full_attn_layers"], _FULL)
    for number in nested["kda_layers"]:
        if number in numbers:
            config.refuse("linear_attn_config", f"layer number {number} is in both lists")
        numbers[number] = _LINEAR
    layers = config.integer("num_hidden_layers")
    if sorted(numbers) != list(range(1, layers + 1)):
        config.refuse("linear_attn_config", f"the lists do not name each of the layer numbers 1 to {layers} once")
    return [numbers[number] for number in sorted(numbers)]
