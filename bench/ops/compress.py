"""The CSA compressor, from raw rows to stored entries, beside eager code that stores nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import hetkv.ops

from .paged import lengths
from .timing import Line, Run, beside


def csa_case(tokens: int) -> tuple[Run, Run]:
    """Entries of 512 values, ratio 4, stored as packed FP8: the op, and eager code without rope and store."""
    ratio, width, rope = 4, 512, 64
    kv, gate = torch.randn(tokens, 2 * width), torch.randn(tokens, 2 * width)
    bias, norm = torch.randn(ratio, 2 * width), torch.ones(width)
    cos, sin = torch.ones(tokens, rope // 2), torch.zeros(tokens, rope // 2)
    entries, rows_per_block = tokens // ratio, 64
    data, scales = rows_per_block * (width + 64), rows_per_block * 8
    units = -(-(data + scales) // 256)
    ring_unit = entries // rows_per_block * units
    arena = torch.zeros(ring_unit * 256 + 2 * 8 * 2 * width * 4, dtype=torch.uint8)
    slots = torch.zeros(tokens, dtype=torch.int64)
    number = torch.arange(entries)
    slots[ratio - 1 :: ratio] = number // rows_per_block * units * rows_per_block + number % rows_per_block
    ring = torch.tensor([[ring_unit]], dtype=torch.int32)

    def ours() -> None:
        hetkv.ops.compress(
            arena,
            kv,
            gate,
            bias,
            norm,
            cos,
            sin,
            lengths(0, tokens),
            lengths(tokens),
            ring,
            slots,
            ratio=ratio,
            overlap=True,
            ring_rows=8,
            ring_kv_offset=0,
            ring_gate_offset=8 * 2 * width * 4,
            rows_per_block=rows_per_block,
            section_offset=0,
            entry_format="fp8_packed",
            scale_offset=data,
        )

    def eager() -> object:
        values, logits = kv.view(entries, ratio, -1), gate.view(entries, ratio, -1) + bias
        early = torch.cat([torch.full((1, ratio, width), -torch.inf), logits[:-1, :, :width]])
        slots_ = torch.cat([early, logits[:, :, width:]], dim=1).softmax(dim=1)
        early_values = torch.cat([torch.zeros(1, ratio, width), values[:-1, :, :width]])
        pooled = (torch.cat([early_values, values[:, :, width:]], dim=1) * slots_).sum(dim=1)
        return pooled * torch.rsqrt(pooled.square().mean(-1, keepdim=True) + 1e-6) * norm

    return ours, eager


def lines(repeats: int) -> Iterator[Line]:
    """4,096 tokens."""
    tokens, width = 4096, 512
    ours, eager = csa_case(tokens)
    yield beside(
        "CSA compress + norm + rope + FP8 store, 4,096 tokens", ours, "torch eager without rope and store", eager,
        amount=2.0 * tokens * 2 * width * 4, unit="GB/s", device="cpu", repeats=repeats,
    )  # fmt: skip
