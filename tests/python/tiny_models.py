"""Tiny random models of the five served families, float32, seeded."""

from __future__ import annotations

from collections.abc import Callable

import transformers
from torch import nn

from hetkv.tools.demo.models import build_model, draw_weights

VOCABULARY = 256


def _deepseek_v32() -> nn.Module:
    config = transformers.DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=2, kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16, qk_nope_head_dim=16,
        index_topk=96, index_head_dim=16, index_n_heads=2, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _finish(transformers.DeepseekV32ForCausalLM(config))


def _qwen3_next() -> nn.Module:
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=4,
        shared_expert_intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4,
        num_experts_per_tok=2, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, max_position_embeddings=2048,
    )  # fmt: skip
    return _finish(transformers.Qwen3NextForCausalLM(config))


def _finish(model: nn.Module) -> nn.Module:
    draw_weights(model, 0)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model.eval()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v4": lambda: build_model("deepseek_v4", VOCABULARY, 0),
    "deepseek_v32": _deepseek_v32,
    "gpt_oss": lambda: build_model("gpt_oss", VOCABULARY, 0),
    "gemma3": lambda: build_model("gemma3", VOCABULARY, 0),
    "qwen3_next": _qwen3_next,
}
