"""Which adapter serves which model type."""

from __future__ import annotations

from typing import Any

import torch

from .deepseek_v4 import DeepseekV4State
from .deepseek_v32 import DeepseekV32State
from .key_value import KeyValueState, Qwen3NextState
from .state import StateAdapter, UnsupportedModelError

_FAMILIES: dict[str, type[StateAdapter]] = {
    "deepseek_v4": DeepseekV4State,
    "deepseek_v32": DeepseekV32State,
    "gpt_oss": KeyValueState,
    "gemma3_text": KeyValueState,
    "qwen3_next": Qwen3NextState,
}


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s of text configs that can be served."""
    return tuple(_FAMILIES)


def adapter_for(model: torch.nn.Module) -> StateAdapter:
    """The adapter of a transformers causal language model.

    UnsupportedModelError for an unknown `model_type`, for a model that is not in evaluation mode (dropout makes rows
    irreproducible) and for one that is spread over several devices.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{type(model).__name__} is no transformers model: it has no config")
    text = config.get_text_config(decoder=True)
    family = _FAMILIES.get(text.model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModelError(f"model type {text.model_type!r} is not served; served are {known}")
    if model.training:
        raise UnsupportedModelError("the model is in training mode; call model.eval() first")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1:
        raise UnsupportedModelError(f"the model is spread over {sorted(map(str, devices))}; one device is served")
    return family(text, next(model.parameters()).dtype, devices.pop())
