"""compress beside transformers' own DeepSeek-V4 compressors: CSA, HCA and the indexer's, any chunking, float32."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetkv.ops

transformers = pytest.importorskip("transformers", minversion="5.24")
modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")

TOKENS = 300
WIDTH = 96  # of hidden states


def configuration() -> Any:
    return transformers.DeepseekV4Config(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=512,
        vocab_size=64,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        index_head_dim=128,
        index_n_heads=4,
        index_topk=8,
        q_lora_rank=32,
    )


def draw(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
        else:
            parameter.normal_(0, 1 if "bias" in name else 0.15)


class Ours:
    """One compressor's entries by hetkv.ops.compress: an arena of NaN bytes with one block of entries and the ring behind it."""

    def __init__(self, module: Any, width: int, *, overlap: bool, eps: float) -> None:
        self.module, self.width, self.overlap, self.eps = module, width, overlap, eps
        self.ratio = int(module.compress_rate)
        self.ring_rows = 1 << (self.ratio * (2 if overlap else 1) - 1).bit_length()
        self.count = TOKENS // self.ratio
        self.rows_per_block = 1 << (self.count - 1).bit_length()
        self.entry_bytes = self.rows_per_block * width * 4
        self.half = self.ring_rows * width * (2 if overlap else 1) * 4
        self.arena = torch.full((self.entry_bytes + 2 * self.half,), 255, dtype=torch.uint8)

    def step(self, hidden: Tensor, begin: int) -> None:
        positions = torch.arange(begin, begin + hidden.shape[1])
        first = (positions + 1 - self.ratio).clamp_min(0)[None]
        cos, sin = self.module.rotary_emb(hidden, position_ids=first, layer_type="compress")
        closes = (positions + 1) % self.ratio == 0
        slots = torch.where(closes, (positions + 1) // self.ratio - 1, -1)
        hetkv.ops.compress(
            self.arena,
            self.module.kv_proj(hidden)[0].contiguous(),
            self.module.gate_proj(hidden)[0].contiguous(),
            self.module.position_bias.detach(),
            self.module.kv_norm.weight.detach(),
            cos[0].contiguous(),
            sin[0].contiguous(),
            torch.tensor([0, len(positions)], dtype=torch.int32),
            torch.tensor([begin + len(positions)], dtype=torch.int32),
            torch.tensor([[self.entry_bytes // 256]], dtype=torch.int32),
            slots,
            ratio=self.ratio,
            overlap=self.overlap,
            ring_rows=self.ring_rows,
            ring_kv_offset=0,
            ring_gate_offset=self.half,
            rows_per_block=self.rows_per_block,
            section_offset=0,
            entry_format="float32",
            norm_eps=self.eps,
        )

    @property
    def entries(self) -> Tensor:
        return self.arena[: self.count * self.width * 4].view(torch.float32).view(self.count, self.width)


@pytest.mark.parametrize("which", ["csa", "hca", "indexer"])
@pytest.mark.parametrize("cuts", [[], [150], [127, 128, 129], [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233]])
def test_entries_are_those_of_transformers(which: str, cuts: list[int]) -> None:
    torch.manual_seed(3)
    config = configuration()
    with torch.inference_mode():
        if which == "hca":
            outer = module = modeling.DeepseekV4HCACompressor(config)
        else:
            outer = modeling.DeepseekV4CSACompressor(config)
            module = outer.indexer if which == "indexer" else outer
        draw(outer)
        layer, name = (1 if which == "hca" else 0), ("indexer" if which == "indexer" else "compressor")
        ours = Ours(module, 128 if which == "indexer" else 512, overlap=which != "hca", eps=config.rms_norm_eps)
        hidden, query = torch.randn(1, TOKENS, WIDTH), torch.randn(1, TOKENS, 32)
        cache = transformers.DynamicCache(config=config)
        for begin, end in itertools.pairwise([0, *cuts, TOKENS]):
            outer(hidden[:, begin:end], query[:, begin:end], torch.arange(begin, end)[None], cache, layer)
            ours.step(hidden[:, begin:end], begin)
        theirs = cache.layers[layer].compressed_kv[name][0]
    torch.testing.assert_close(ours.entries, theirs, rtol=1e-5, atol=1e-5)
