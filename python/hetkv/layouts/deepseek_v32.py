"""DeepSeek-V3.2: one latent row per token on every layer, and the key by which the indexer finds it."""

from __future__ import annotations

from .._core import DType, FieldSpec, GroupSpec, ObjectKind, Retention
from .model_config import ModelConfig

_INDEXED = "indexed_attention"


def deepseek_v32_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `DeepseekV32ForCausalLM` cache, one row per token.

    `latent`: keys [`kv_lora_rank`], and values [`qk_rope_head_dim`], which holds the rotated key and not a value: transformers
    keeps the two latents where other models keep K and V. `index`: key [`index_head_dim`].
    """
    # Layers do not differ in this architecture, and checkpoints carry no map.
    types = config.layer_types([_INDEXED], [_INDEXED] * config.integer("num_hidden_layers"))
    layers = list(range(len(types)))
    return [
        latent_group(config, layers, dtype),
        GroupSpec(
            "index",
            ObjectKind.indexer_state,
            Retention.history,
            owner_layers=layers,
            fields=[FieldSpec("key", dtype, [config.integer("index_head_dim")])],
            indexes="latent",
        ),
    ]


def latent_group(config: ModelConfig, layers: list[int], dtype: DType) -> GroupSpec:
    """The group `latent` of a model with multi-head latent attention: the compressed row and the shared rope key per token."""
    return GroupSpec(
        "latent",
        ObjectKind.full_kv,
        Retention.history,
        owner_layers=layers,
        fields=[
            FieldSpec("keys", dtype, [config.integer("kv_lora_rank")]),
            FieldSpec("values", dtype, [config.integer("qk_rope_head_dim")]),
        ],
    )
