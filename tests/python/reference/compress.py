"""The compressor in float64, one sequence at a time, from the whole history of its raw rows."""

import torch
from torch import Tensor


def rotate_trailing_pairs(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the last ``2 * cos.shape[-1]`` values of each row, pair by pair: (a, b) becomes (a c - b s, b c + a s)."""
    turned = rows.clone()
    first = rows.shape[-1] - 2 * cos.shape[-1]
    a, b = rows[..., first::2], rows[..., first + 1 :: 2]
    turned[..., first::2] = a * cos - b * sin
    turned[..., first + 1 :: 2] = b * cos + a * sin
    return turned


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps) * weight


def pooled_windows(kv: Tensor, gate: Tensor, position_bias: Tensor, *, ratio: int, overlap: bool) -> Tensor:
    """The pooled rows of all windows that close within the first ``kv.shape[0]`` tokens of a sequence: ``float64[windows, c]``.

    Args:
        kv, gate: ``[tokens, c]``, with overlap ``[tokens, 2 c]``: rows of position 0 onwards, the gate without bias.
        position_bias: ``[ratio, c]`` or ``[ratio, 2 c]``: row ``position % ratio`` is added to the gate.

    Without overlap window ``w`` pools the tokens ``[ratio w, ratio (w + 1))``. With overlap it pools the first halves of the
    tokens of window ``w - 1`` and the second halves of its own; window 0 has only its own.
    """
    kv, gate, position_bias = kv.double(), gate.double(), position_bias.double()
    width = kv.shape[1] // (2 if overlap else 1)
    pooled = torch.empty(kv.shape[0] // ratio, width, dtype=torch.float64)
    for w in range(pooled.shape[0]):
        own = slice(ratio * w, ratio * (w + 1))
        values, logits = kv[own], gate[own] + position_bias
        if overlap:
            values, logits = values[:, width:], logits[:, width:]
            if w > 0:
                before = slice(ratio * (w - 1), ratio * w)
                values = torch.cat([kv[before, :width], values])
                logits = torch.cat([(gate[before] + position_bias)[:, :width], logits])
        pooled[w] = (values * logits.softmax(dim=0)).sum(dim=0)
    return pooled


def compressed_entries(
    kv: Tensor,
    gate: Tensor,
    position_bias: Tensor,
    norm_weight: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    ratio: int,
    overlap: bool,
    norm_eps: float = 1e-6,
) -> Tensor:
    """All entries of a sequence, pooled, normed and rotated, before any rounding to a stored format: ``float64[windows, c]``.

    ``cos`` and ``sin`` are ``[windows, rope / 2]``: the rotation of position ``ratio * w``. The rest as for ``pooled_windows``.
    """
    pooled = pooled_windows(kv, gate, position_bias, ratio=ratio, overlap=overlap)
    return rotate_trailing_pairs(rms_norm(pooled, norm_weight.double(), norm_eps), cos.double(), sin.double())


def ring_after(rows: Tensor, ring_rows: int, ring: Tensor) -> Tensor:
    """The ring after the raw rows of positions ``[0, rows.shape[0])``, that held ``ring`` before the first of them."""
    after = ring.clone()
    for position in range(max(0, rows.shape[0] - ring_rows), rows.shape[0]):
        after[position % ring_rows] = rows[position]
    return after
