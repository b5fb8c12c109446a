"""Attention and its index in float64, token by token, from whole rows of values. Independent of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .compress import rotate_trailing_pairs


def softmax_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, sink: float | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """One vector against its keys ``[n, dim]``: output and lse without the sink; no keys: 0 and -inf."""
    scores = keys.double() @ query.double() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    lse = torch.logsumexp(scores, dim=0)
    if len(keys) == 0:
        return torch.zeros(values.shape[1], dtype=torch.float64), lse
    total = lse if sink is None else torch.logaddexp(lse, torch.tensor(sink, dtype=torch.float64))
    return torch.exp(scores - total) @ values.double(), lse


def paged(
    query: Tensor, keys: Tensor, values: Tensor, *, position: int, window: int, scale: float, sinks: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """All heads of one token: query ``[heads, dim]``, keys and values ``[tokens, kv heads, dim]``."""
    group = query.shape[0] // keys.shape[1]
    begin = max(0, position - window + 1) if window else 0
    outs, lses = [], []
    for head, vector in enumerate(query):
        sink = None if sinks is None else float(sinks[head])
        out, lse = softmax_attention(
            vector,
            keys[begin : position + 1, head // group],
            values[begin : position + 1, head // group],
            scale=scale,
            sink=sink,
            softcap=softcap,
        )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def sparse(
    query: Tensor,
    rows: Tensor,
    entries: Tensor,
    *,
    position: int,
    window: int,
    selected: list[int],
    scale: float,
    sinks: Tensor | None,
    rotation: tuple[Tensor, Tensor] | None,
    value_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """All heads of one token: window rows and selected entries in one softmax, the output rotated back. value_dim 0: all."""
    keys = torch.cat([rows[max(0, position - window + 1) : position + 1], entries[selected]])
    values = keys[:, : value_dim or keys.shape[1]]
    outs, lses = [], []
    for head, vector in enumerate(query):
        out, lse = softmax_attention(vector, keys, values, scale=scale, sink=None if sinks is None else float(sinks[head]))
        outs.append(out)
        lses.append(lse)
    out = torch.stack(outs)
    if rotation is not None:
        out = rotate_trailing_pairs(out, rotation[0].double(), -rotation[1].double())
    return out, torch.stack(lses)


def scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Index scores of one token: query ``[heads, dim]``, weights ``[heads]``, keys ``[entries, dim]``."""
    return (torch.relu(query.double() @ keys.double().T) * weights.double()[:, None]).sum(dim=0)


def best(row: Tensor, k: int) -> list[int]:
    """Indices of the k best scores: score descending, then index ascending; NaN last; -1 behind the last."""
    order = sorted(range(len(row)), key=lambda i: (bool(torch.isnan(row[i])), -float(row[i]) if row[i] == row[i] else 0.0, i))
    return (order + [-1] * k)[:k]
