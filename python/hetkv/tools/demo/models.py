"""Tiny random-weight models with the real geometry: ratios 4 and 128, windows of 128 tokens.

Weights are scaled so that a comparison of logits is a sensitive check: one zeroed row anywhere in the cache changes the
logits by 1e-2 or more within 160 tokens. Everything is float32 and seeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WINDOW = 128
"""Tokens, counting the query, of every sliding-window layer."""

MODEL_NAMES = ("deepseek_v4", "gpt_oss", "gemma3")

_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _deepseek_v4(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "hash_moe", "hash_moe", "moe"],
        "num_attention_heads": 4,
        "head_dim": 32,
        "q_lora_rank": 32,
        "partial_rotary_factor": 0.25,
        "o_groups": 2,
        "o_lora_rank": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
        "sliding_window": WINDOW,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 64,
        "max_position_embeddings": 8192,
        **_TOKENS,
    }


def _gpt_oss(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": WINDOW,
        "max_position_embeddings": 8192,
        **_TOKENS,
    }


def _gemma3(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        **_TOKENS,
    }


# Of each family: what is set, the class of its configuration, and of its model.
_FAMILIES: dict[str, tuple[Callable[[int], dict[str, Any]], str, str]] = {
    "deepseek_v4": (_deepseek_v4, "DeepseekV4Config", "DeepseekV4ForCausalLM"),
    "gpt_oss": (_gpt_oss, "GptOssConfig", "GptOssForCausalLM"),
    "gemma3": (_gemma3, "Gemma3TextConfig", "Gemma3ForCausalLM"),
}


def tiny_config(name: str, vocabulary: int, **changes: Any) -> Any:
    """The text configuration of the named tiny model; `changes` replace single settings."""
    settings, config, _ = _FAMILIES[name]
    return getattr(transformers, config)(**settings(vocabulary) | changes)


def build_model(name: str, vocabulary: int, seed: int) -> nn.Module:
    """The named tiny model in evaluation mode, float32, eager attention, weights drawn from `seed`."""
    model: nn.Module = getattr(transformers, _FAMILIES[name][2])(tiny_config(name, vocabulary))
    draw_weights(model, seed)
    model.set_attn_implementation("eager")  # type: ignore[operator]
    return model.eval()


def draw_weights(model: nn.Module, seed: int) -> None:
    """Fills every parameter and table of `model` from `seed`: matrices by fan-in, norms near 1, biases and sinks small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_draw(name, parameter, generator))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(_expert_table(buffer, int(config_of(model).num_local_experts), generator))


# Factors on the fan-in scale, by the parameter's name: sharper attention and a larger share of it in the residual stream
# make each cached row count.
_GAINS = (
    ("q_norm", 0.3),  # Gemma's norms add 1
    ("k_norm", 0.3),
    ("compressor", 2.0),  # its norm and projections: one of 128 rows in one of a few entries
    ("kv_norm", 1.3),
    ("q_proj", 1.2),
    ("k_proj", 1.2),
    ("v_proj", 1.5),
    ("o_proj", 1.5),
    ("o_b_proj", 1.5),
)


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    parts = name.split(".")
    leaf = parts[-1]
    gain = next((factor for part, factor in _GAINS if part in parts), 1.0)
    if "norm" in name and parameter.dim() == 1:
        return gain + 0.1 * noise
    if leaf == "sinks" or leaf.endswith("bias"):
        return 0.3 * noise
    if leaf in ("base", "hc_base"):
        return 0.3 * noise
    if leaf in ("scale", "hc_scale"):
        return 1.0 + 0.3 * noise
    if "embed_tokens" in parts:
        return noise
    return noise * (gain / math.sqrt(parameter.shape[-1]))


def _expert_table(buffer: torch.Tensor, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for every token id, [vocabulary, experts per token]."""
    order = torch.rand((buffer.shape[0], experts), generator=generator).argsort(dim=-1)
    return order[:, : buffer.shape[1]]


def config_of(model: nn.Module) -> Any:
    """The text configuration of a model built here."""
    return model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
