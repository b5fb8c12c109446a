"""The cache layout of a model, from its own config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _core
from .layouts import FAMILIES
from .layouts.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

__all__ = ["layout_from_config", "supported_model_types"]


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that `layout_from_config` knows, sorted."""
    return tuple(sorted(FAMILIES))


def layout_from_config(config: Any, block_size: int = 64, dtype: str | torch.dtype = "float32") -> _core.CacheLayout:
    """The layout of what a transformers `DynamicCache(config=...)` holds for this model, one group per kind of state.

    config: a transformers config object, or a checkpoint's `config.json` as a dict. A multimodal config is read at its
    `text_config`. Layers are mapped by the config's own fields (`layer_types`, `compress_ratios`, ...). A dict that lacks a
    field is refused rather than completed; a config object comes with transformers' defaults, whose layer map may differ
    from the checkpoint's, so load it from the checkpoint.
    block_size: tokens per block, a power of two.
    dtype: of the model's activations, so of the cached rows, as torch spells it. States that the model keeps in float32
    whatever its dtype (recurrent states, gates with their bias) are float32 (or wider) here too.

    LayoutError for an unknown model type, a missing or inconsistent field, or per-layer overrides; ArgumentError for an
    unknown dtype.
    """
    text = ModelConfig(config).text()
    model_type = text.model_type()
    family = FAMILIES.get(model_type)
    if family is None:
        text.refuse("model_type", f"{model_type!r} is not supported; supported are {', '.join(supported_model_types())}")
    text.refuse_overrides()
    element = _core.dtype_from_name(str(dtype).removeprefix("torch."))
    return _core.CacheLayout.build(model_type, block_size, family(text, element))
