"""Block-routed attention in float64, token by token, from whole rows of values. Independent of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import softmax_attention


def block_scores(query: Tensor, keys: Tensor, *, position: int, routed_tokens: int, local_blocks: int, num_blocks: int) -> Tensor:
    """One token: query ``[heads, dim]``, keys ``[tokens, dim]``; float64 ``[heads, num_blocks]``."""
    scores = query.double() @ keys[: position + 1].double().T
    out = torch.full((len(query), num_blocks), -torch.inf, dtype=torch.float64)
    own = position // routed_tokens
    for block in range(own + 1):
        out[:, block] = scores[:, block * routed_tokens : (block + 1) * routed_tokens].amax(dim=1)
        if block > own - local_blocks:
            out[:, block] = torch.inf
    return out


def seen_tokens(blocks: list[int], *, position: int, routed_tokens: int) -> list[int]:
    """The tokens that a list of blocks leads to, in rising order."""
    return [t for t in range(position + 1) if t // routed_tokens in blocks]


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    selected: Tensor,
    *,
    position: int,
    routed_tokens: int,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """All heads of one token: query ``[heads, dim]``, keys and values ``[tokens, kv heads, dim]``, selected ``[kv heads, k]``."""
    group = query.shape[0] // keys.shape[1]
    outs, lses = [], []
    for head, vector in enumerate(query):
        seen = seen_tokens(selected[head // group].tolist(), position=position, routed_tokens=routed_tokens)
        out, lse = softmax_attention(
            vector,
            keys[seen, head // group],
            values[seen, head // group],
            scale=scale,
            sink=None if sinks is None else float(sinks[head]),
        )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)
