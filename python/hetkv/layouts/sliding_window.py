"""gpt-oss and Gemma 3: some layers see the whole prefix, the others a window of it."""

from __future__ import annotations

from collections.abc import Iterable

from .._core import DType, GroupSpec
from .key_value import full_group, window_group
from .model_config import ModelConfig, layers_of

_FULL = "full_attention"
_SLIDING = "sliding_attention"


def gpt_oss_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `GptOssForCausalLM` cache: `full` and `swa`. Groups without layers are left out."""
    return _groups(config, dtype)


def gemma3_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `Gemma3ForCausalLM` cache, or of the language model in a `Gemma3ForConditionalGeneration`.

    Older checkpoints write `sliding_window_pattern` n instead of `layer_types`: every n-th layer is full.
    """
    if config.get("use_bidirectional_attention"):
        config.refuse("use_bidirectional_attention", "rows depend on later tokens, so no prefix can be reused")
    types: list[str] | None = None
    if config.get("sliding_window_pattern") is not None:
        period = config.integer("sliding_window_pattern")
        types = [_SLIDING if (layer + 1) % period else _FULL for layer in range(config.integer("num_hidden_layers"))]
    return _groups(config, dtype, types)


def _groups(config: ModelConfig, dtype: DType, derived: Iterable[str] | None = None) -> list[GroupSpec]:
    types = config.layer_types((_FULL, _SLIDING), derived)
    groups = []
    if full := layers_of(types, _FULL):
        groups.append(full_group(config, full, dtype))
    if sliding := layers_of(types, _SLIDING):
        groups.append(window_group(config, sliding, dtype))
    return groups
