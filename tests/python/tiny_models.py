"""Tiny configurations and random models of every served family, float32, seeded.

Those that the demo shows come from there; the others are only tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from torch import nn

from hetkv.tools.demo.models import build_model, draw_weights, tiny_config

VOCABULARY = 256


def _config(family: Callable[..., Any], changes: dict[str, Any], **settings: Any) -> Any:
    return family(**settings | changes)


def _deepseek_v32(vocabulary: int, **changes: Any) -> Any:
    return _config(
        transformers.DeepseekV32Config, changes,
        vocab_size=vocabulary, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=2, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16,
        index_topk=96, index_head_dim=16, index_n_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _qwen3_next(vocabulary: int, **changes: Any) -> Any:
    return _config(
        transformers.Qwen3NextConfig, changes,
        vocab_size=vocabulary, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        shared_expert_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip


def _kimi_linear(vocabulary: int, **changes: Any) -> Any:
    return _config(
        transformers.KimiLinearConfig, changes,
        vocab_size=vocabulary, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=20, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, linear_attn_config=dict(KIMI_LAYERS),
    )  # fmt: skip


KIMI_LAYERS = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 6, "num_heads": 5, "short_conv_kernel_size": 3}
"""Layers count from 1."""

CONFIGS: dict[str, Callable[..., Any]] = {
    "deepseek_v32": _deepseek_v32,
    "deepseek_v4": partial(tiny_config, "deepseek_v4"),
    "gemma3_text": partial(tiny_config, "gemma3"),
    "gpt_oss": partial(tiny_config, "gpt_oss"),
    "kimi_linear": _kimi_linear,
    "qwen3_next": _qwen3_next,
}
"""By `model_type`: (vocabulary, **changes) to a text configuration."""


def _finish(model: nn.Module) -> nn.Module:
    draw_weights(model, 0)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model.eval()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v4": lambda: build_model("deepseek_v4", VOCABULARY, 0),
    "deepseek_v32": lambda: _finish(transformers.DeepseekV32ForCausalLM(_deepseek_v32(VOCABULARY))),
    "gpt_oss": lambda: build_model("gpt_oss", VOCABULARY, 0),
    "gemma3": lambda: build_model("gemma3", VOCABULARY, 0),
    "qwen3_next": lambda: _finish(transformers.Qwen3NextForCausalLM(_qwen3_next(VOCABULARY))),
}
