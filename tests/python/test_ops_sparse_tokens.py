"""sparse_attention on selected tokens, as DeepSeek-V3.2 has it: keys are latent and rotated values, values the latent ones.

Against float64, and the whole path (write_rows, select_entries, sparse_attention) against transformers' own attention module.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetkv.ops
from paged_world import World, section, sums
from test_ops_sparse import Routed

INF = float("inf")
LATENT, ROTATED = 512, 64


def tokens_of_v32(lengths: list[int], heads: int, row_format: str = "float32") -> Routed:
    return Routed(
        lengths, heads=heads, dim=LATENT + ROTATED, window=0, ratio=1, entry_format=row_format, value_dim=LATENT, seed=heads
    )


@pytest.mark.parametrize(("row_format", "heads"), [("float32", 5), ("bfloat16", 128), ("float16", 5), ("fp8_packed", 70)])
def test_the_shape_of_deepseek_v32(row_format: str, heads: int) -> None:
    routed = tokens_of_v32([200, 1, 66], heads, row_format)
    counts = [2, 1, 3]
    query = routed.world.randn(6, heads, LATENT + ROTATED)
    for selected in (routed.select(counts, 64), None):
        routed.check(query, counts, selected)
        assert routed.run(query, counts, selected)[0].shape == (6, heads, LATENT)
    angle = routed.world.randn(6, 5)
    routed.check(query, counts, routed.select(counts, 9), sinks=routed.world.randn(heads), cos=angle.cos(), sin=angle.sin())
    out, _ = routed.run(query.bfloat16(), counts, None)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), routed.run(query.bfloat16().float(), counts, None)[0], rtol=1e-2, atol=1e-2)


def test_what_only_keys_have_does_not_reach_the_output() -> None:
    """Rotated values that are infinite, of tokens that weigh nothing: the output stays what it was."""
    routed = tokens_of_v32([40], 3)
    query = routed.world.randn(1, 3, LATENT + ROTATED).abs()
    strange = torch.cat([routed.entries[0][7:8, :LATENT], torch.full((1, ROTATED), -INF)], dim=1).float()
    others = torch.tensor([[i for i in range(40) if i != 7]], dtype=torch.int32)
    expected = routed.run(query, [1], others)
    routed.world.put(routed.entries_at, routed.entry_table[0], strange, first=7)
    with_it = torch.cat([others, torch.tensor([[7]], dtype=torch.int32)], dim=1)
    for got, wanted in zip(routed.run(query, [1], with_it), expected, strict=True):
        assert torch.equal(got, wanted)


def test_tokens_that_select_nothing_and_padding() -> None:
    routed = tokens_of_v32([20, 30], 2)
    query = routed.world.randn(4, 2, LATENT + ROTATED)
    selected = torch.full((4, 3), -1, dtype=torch.int32)
    selected[1, 1] = 19
    out, lse = routed.run(query, [2, 1], selected, used=[20, 0])
    torch.testing.assert_close(out[1].double(), routed.entries[0][19, :LATENT].expand(2, LATENT))
    for token in (0, 2, 3):
        assert bool((out[token] == 0).all())
        assert bool((lse[token] == -INF).all())
    assert routed.run(query[:0], [0, 0], selected[:0])[0].shape == (0, 2, LATENT)


def test_the_section_of_no_window_is_not_looked_at() -> None:
    routed = tokens_of_v32([20], 2)
    query = routed.world.randn(1, 2, LATENT + ROTATED)
    expected = routed.run(query, [1], None)[0]
    numbers = {**routed.numbers(), "window_rows_per_block": 3, "window_offset": 2**40, "window_format": "none"}
    got, _ = hetkv.ops.sparse_attention(
        query, routed.world.arena, torch.empty(1, 0, dtype=torch.int32), routed.entry_table, None, sums([1]),
        torch.tensor([20], dtype=torch.int32), **numbers,
    )  # fmt: skip
    assert torch.equal(got, expected)


def test_opcheck_and_compile() -> None:
    routed = tokens_of_v32([30, 64], 3)
    tensors = (
        routed.world.randn(2, 3, LATENT + ROTATED), routed.world.arena, routed.window_table, routed.entry_table,
        routed.select([1, 1], 4), sums([1, 1]), torch.tensor([30, 64], dtype=torch.int32),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hetkv.sparse_attention.default, tensors, routed.numbers())
    compiled = torch.compile(lambda *a: hetkv.ops.sparse_attention(*a, **routed.numbers()), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors)[0], hetkv.ops.sparse_attention(*tensors, **routed.numbers())[0])


# --- transformers ---


class Blocks:
    """One sequence's rows and index keys of one layer, and attention of transformers' module on them, absorbed."""

    def __init__(self, module: Any, length: int) -> None:
        self.module = module
        rank, rope = module.kv_lora_rank, module.qk_rope_head_dim
        self.rows_at = section("float32", rank + rope, 8)
        self.keys_at = section("float32", module.indexer.head_dim, 8, offset=self.rows_at.end)
        self.world = World(1, length // 8 + 3, self.keys_at.end)
        self.table = self.world.table([length], 8)

    def attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, begin: int) -> Tensor:
        """Attention output of tokens [begin, begin + n): hidden [n, hidden size], cos and sin [n, rope / 2]."""
        module, n = self.module, len(hidden)
        rank, nope, rope = module.kv_lora_rank, module.qk_nope_head_dim, module.qk_rope_head_dim
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        plain, rotated = module.q_b_proj(residual).view(n, -1, nope + rope).split([nope, rope], dim=-1)
        up = module.kv_b_proj.weight.view(-1, nope + module.v_head_dim, rank)
        rotated = rotate(rotated.unflatten(-1, (-1, 2)), cos[:, None], sin[:, None]).flatten(-2)
        query = torch.cat([torch.einsum("thd,hdr->thr", plain, up[:, :nope]), rotated], dim=-1)

        latent, key = module.kv_a_proj_with_mqa(hidden).split([rank, rope], dim=-1)
        slots = self.world.slots(self.table[0], range(begin, begin + n), 8)
        hetkv.ops.write_rows(
            self.world.arena, torch.cat([module.kv_a_layernorm(latent), key], dim=-1), slots,
            rows_per_block=8, section_offset=self.rows_at.offset, entry_format="float32", cos=cos, sin=sin,
        )  # fmt: skip
        step = (sums([n]), torch.tensor([begin + n], dtype=torch.int32))
        selected = self.select(hidden, residual, (cos, sin), slots, step)
        out, _ = hetkv.ops.sparse_attention(
            query, self.world.arena, self.table[:, :0], self.table, selected, *step,
            window=0, window_rows_per_block=1, window_offset=0, window_format="float32", ratio=1,
            entry_rows_per_block=8, entry_offset=self.rows_at.offset, entry_format="float32",
            scale=module.scaling, value_dim=rank,
        )  # fmt: skip
        output: Tensor = module.o_proj(torch.einsum("thr,hvr->thv", out, up[:, nope:]).flatten(1))
        return output

    def select(
        self, hidden: Tensor, residual: Tensor, rotation: tuple[Tensor, Tensor], slots: Tensor, step: tuple[Tensor, Tensor]
    ) -> Tensor:
        indexer, (cos, sin) = self.module.indexer, rotation
        hetkv.ops.write_rows(
            self.world.arena, indexer.k_norm(indexer.wk(hidden)), slots, rows_per_block=8, section_offset=self.keys_at.offset,
            entry_format="float32", cos=cos, sin=sin, rope_interleaved=False, rope_trailing=False,
        )  # fmt: skip
        query = indexer.wq_b(residual).view(len(hidden), indexer.n_heads, indexer.head_dim)
        rope = indexer.qk_rope_head_dim
        halves = query[..., :rope].unflatten(-1, (2, -1)).transpose(-1, -2)  # pairs of the two halves
        query = torch.cat([rotate(halves, cos[:, None], sin[:, None]).transpose(-1, -2).flatten(-2), query[..., rope:]], dim=-1)
        weights = indexer.weights_proj(hidden) * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        return hetkv.ops.select_entries(
            query, weights, self.world.arena, self.table, *step, ratio=1, rows_per_block=8,
            section_offset=self.keys_at.offset, entry_format="float32", k=indexer.index_topk,
        )  # fmt: skip


def rotate(pairs: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = pairs.unbind(dim=-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1)


@pytest.mark.parametrize(("rank", "rope"), [(32, 8), (LATENT, ROTATED)])
@torch.no_grad()
def test_transformers_attention_prefilled_in_chunks_and_decoded(rank: int, rope: int) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    modeling = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    # Many index heads: a score is exactly 0, a tie that transformers breaks by chance, where all of them are negative.
    config = transformers.DeepseekV32Config(
        vocab_size=64, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32,
        kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=16, v_head_dim=16, index_topk=40, index_head_dim=rope + 8,
        index_n_heads=32, max_position_embeddings=512, attn_implementation="eager",
    )  # fmt: skip
    length, prompt = 280, 140
    torch.manual_seed(3)
    module = modeling.DeepseekV32Attention(config, 0).eval()
    for name, parameter in module.named_parameters():
        if "norm" not in name:
            nn.init.normal_(parameter, std=3 / parameter.shape[1] ** 0.5)
    nn.init.normal_(module.indexer.k_norm.bias)
    hidden = torch.randn(1, length, 48)
    positions = torch.arange(length)
    cos, sin = modeling.DeepseekV32RotaryEmbedding(config)(hidden, positions[None])
    mask = torch.full((length, length), -INF).triu(1)[None, None]
    expected = module(hidden, (cos, sin), mask)[0][0]

    cos, sin = (angle[0, :, : rope // 2].contiguous() for angle in (cos, sin))
    cuts = [0, 1, 70, 71, *range(prompt, length + 1)]
    blocks = Blocks(module, length)
    got = torch.cat([
        blocks.attend(hidden[0, begin:end], cos[begin:end], sin[begin:end], begin)
        for begin, end in pairwise(cuts)
    ])  # fmt: skip
    assert float(expected.abs().max()) > 0.5
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
