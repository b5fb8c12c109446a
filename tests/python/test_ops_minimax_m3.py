"""block_scores, top_k and block_sparse_attention against transformers' own MiniMax-M3 attention: a prompt in chunks, decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hetkv.ops
from paged_world import World, section, sums

minimax = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
transformers = pytest.importorskip("transformers")

LENGTH, DECODED = 330, 140


def _config(**changes: Any) -> Any:
    settings = {
        "vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 16, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 16, "index_topk_blocks": 4,
        "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["minimax_m3_sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "max_position_embeddings": 1024,
    }  # fmt: skip
    config = minimax.MiniMaxM3VLTextConfig(**{**settings, **changes})
    config._attn_implementation = "eager"
    return config


def _module(config: Any) -> Any:
    torch.manual_seed(0)
    module = minimax.MiniMaxM3VLAttention(config, 0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


class Paged:
    """The module's attention on blocks of hetkv: its own projections and norms, everything behind them from the ops."""

    def __init__(self, module: Any, config: Any) -> None:
        self.module, self.config = module, config
        self.index_at = section("float32", config.index_head_dim, 8)
        self.keys_at = section("float32", config.head_dim, 8, heads=config.num_key_value_heads, offset=1024)
        self.values_at = section("float32", config.head_dim, 8, heads=config.num_key_value_heads, offset=4096)
        self.world = World(1, LENGTH // 8 + 1, self.values_at.end)
        self.table = self.world.table([LENGTH], 8)

    def step(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], begin: int) -> tuple[Tensor, Tensor]:
        """hidden ``[1, n, size]``: the module's output and the blocks that were chosen, ``[kv heads, n, k]``."""
        module, config, count = self.module, self.config, hidden.shape[1]
        heads = (1, count, -1, config.head_dim)
        query = module.q_norm(module.q_proj(hidden).view(heads)).transpose(1, 2)
        key = module.k_norm(module.k_proj(hidden).view(heads)).transpose(1, 2)
        query, key = minimax.apply_rotary_pos_emb(query, key, *rotation)
        value = module.v_proj(hidden).view(heads)[0]
        indexer = module.indexer
        index_query = indexer.q_norm(indexer.q_proj(hidden).view(1, count, -1, indexer.head_dim)).transpose(1, 2)
        index_key = indexer.k_norm(indexer.k_proj(hidden).view(1, count, 1, indexer.head_dim)).transpose(1, 2)
        index_query, index_key = minimax.apply_rotary_pos_emb(index_query, index_key, *rotation)

        slots = self.world.slots(self.table[0], range(begin, begin + count), 8)
        arena, plain = self.world.arena, {"rows_per_block": 8, "entry_format": "float32"}
        sections = {"key_offset": self.keys_at.offset, "value_offset": self.values_at.offset}
        hetkv.ops.write_key_value(arena, _token_major(key), value.contiguous(), slots, **sections, **plain)
        hetkv.ops.write_rows(arena, index_key[0, 0].contiguous(), slots, section_offset=self.index_at.offset, **plain)

        tables = (sums([count]), torch.tensor([begin + count], dtype=torch.int32))
        routed = {"routed_tokens": config.index_block_size}
        scores = hetkv.ops.block_scores(
            _token_major(index_query), arena, self.table, *tables,
            section_offset=self.index_at.offset, local_blocks=config.index_local_blocks, **plain, **routed,
        )  # fmt: skip
        chosen = hetkv.ops.top_k(scores.flatten(0, 1), None, config.index_topk_blocks).unflatten(0, scores.shape[:2])
        out, _ = hetkv.ops.block_sparse_attention(
            _token_major(query), arena, self.table, chosen, *tables,
            num_kv_heads=config.num_key_value_heads, scale=module.scaling, **sections, **plain, **routed,
        )  # fmt: skip
        chosen = chosen.masked_fill(scores.gather(2, chosen.clamp(min=0).long()) == -torch.inf, -1)
        return module.o_proj(out.flatten(1))[None], chosen.transpose(0, 1)


def _token_major(tensor: Tensor) -> Tensor:
    """``[1, heads, n, dim]`` to ``[n, heads, dim]``."""
    return tensor[0].transpose(0, 1).contiguous()


# Groups of 4 heads and of 16; one forced block and two; k larger than the number of blocks at first.
@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 32, "index_local_blocks": 2, "index_topk_blocks": 6}])
@torch.no_grad()
def test_chunks_of_a_prompt_and_decoding_agree_with_transformers(changes: dict[str, Any]) -> None:
    config = _config(**changes)
    module, rotary = _module(config), minimax.MiniMaxM3VLRotaryEmbedding(config)
    paged, cache = Paged(module, config), transformers.DynamicCache(config=config)
    chosen: list[Tensor] = []
    module.indexer.register_forward_hook(lambda _module, _arguments, result: chosen.append(result))
    hidden = torch.randn(1, LENGTH, config.hidden_size, generator=torch.Generator().manual_seed(2))
    ends = [7, 16, 90, LENGTH - DECODED, *range(LENGTH - DECODED + 1, LENGTH + 1)]
    for begin, end in zip([0, *ends], ends, strict=False):
        part, positions = hidden[:, begin:end], torch.arange(begin, end)[None]
        rotation = rotary(part, positions)
        expected, _ = module(part, rotation, None, cache, position_ids=positions)
        got, blocks = paged.step(part, rotation, begin)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        wanted = chosen[-1][0]
        assert torch.equal(blocks[..., : wanted.shape[-1]].sort()[0], wanted.int().sort()[0])
    assert len(chosen) == len(ends)
    assert bool((chosen[-1] >= 0).all())
    assert chosen[-1].shape[-1] < LENGTH // config.index_block_size, "blocks are left out"
