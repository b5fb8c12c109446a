"""Groups of plain attention: k and v, one row per token, kept for the whole prefix or for a window."""

from __future__ import annotations

from .._core import DType, FieldSpec, GroupSpec, ObjectKind, Retention
from .model_config import ModelConfig


def full_group(config: ModelConfig, layers: list[int], dtype: DType) -> GroupSpec:
    """The group `full`: k and v [`num_key_value_heads`, `head_dim`]."""
    return GroupSpec("full", ObjectKind.full_kv, Retention.history, owner_layers=layers, fields=_key_and_value(config, dtype))


def window_group(config: ModelConfig, layers: list[int], dtype: DType) -> GroupSpec:
    """The group `swa`: the same rows, of the last `sliding_window` tokens, the query included."""
    return GroupSpec(
        "swa",
        ObjectKind.swa_window,
        Retention.window,
        owner_layers=layers,
        window=config.integer("sliding_window"),
        fields=_key_and_value(config, dtype),
    )


def _key_and_value(config: ModelConfig, dtype: DType) -> list[FieldSpec]:
    shape = [config.integer("num_key_value_heads"), config.integer("head_dim")]
    return [FieldSpec("k", dtype, shape), FieldSpec("v", dtype, shape)]
