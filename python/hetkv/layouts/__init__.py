"""The cache groups of each model family. A family is one function: config and dtype in, group specs out."""

from __future__ import annotations

from collections.abc import Callable

from .. import _core
from .deepseek_v4 import deepseek_v4_groups
from .deepseek_v32 import deepseek_v32_groups
from .linear_attention import kimi_linear_groups, qwen3_next_groups
from .model_config import ModelConfig
from .sliding_window import gemma3_groups, gpt_oss_groups

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Callable[[ModelConfig, _core.DType], list[_core.GroupSpec]]] = {
    "deepseek_v32": deepseek_v32_groups,
    "deepseek_v4": deepseek_v4_groups,
    "gemma3_text": gemma3_groups,
    "gpt_oss": gpt_oss_groups,
    "kimi_linear": kimi_linear_groups,
    "qwen3_next": qwen3_next_groups,
}
