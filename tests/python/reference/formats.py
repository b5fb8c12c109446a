"""Stored row formats in plain torch: bytes of a row, and the values that they mean. Independent of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PACKED = ("fp8_packed", "fp8_index", "mxfp4_index")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def data_bytes(entry_format: str, width: int) -> int:
    if entry_format in DTYPES:
        return DTYPES[entry_format].itemsize * width
    return {"fp8_packed": width + 64, "fp8_index": width, "mxfp4_index": width // 2}[entry_format]


def scale_bytes(entry_format: str, width: int) -> int:
    if entry_format in DTYPES:
        return 0
    return {"fp8_packed": -(-((width - 64) // 64) // 8) * 8, "fp8_index": 4, "mxfp4_index": width // 32}[entry_format]


def encode(rows: Tensor, entry_format: str) -> tuple[Tensor, Tensor]:
    """float32 ``[n, width]`` to uint8 ``[n, data bytes]`` and uint8 ``[n, scale bytes]``."""
    if entry_format in DTYPES:
        return rows.to(DTYPES[entry_format]).contiguous().view(torch.uint8), torch.empty((len(rows), 0), dtype=torch.uint8)
    rounded = rows.bfloat16().float()
    if entry_format == "fp8_packed":
        plain = rows.shape[1] - 64
        codes, exponents = _quantise(rounded[:, :plain], 64, 448.0)
        scales = torch.zeros((len(rows), scale_bytes(entry_format, rows.shape[1])), dtype=torch.uint8)
        scales[:, : plain // 64] = (exponents + 127).to(torch.uint8)
        fp8 = codes.to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.cat([fp8, rows[:, plain:].bfloat16().contiguous().view(torch.uint8)], dim=1), scales
    if entry_format == "fp8_index":
        codes, exponents = _quantise(rounded, rows.shape[1], 448.0)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), torch.exp2(exponents.float()).contiguous().view(torch.uint8)
    codes, exponents = _quantise(rounded, 32, 6.0)
    distance = (codes.abs()[..., None] - E2M1).abs()
    nearest = distance.min(dim=-1, keepdim=True).values
    tied = distance == nearest
    even_first = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    index = even_first[tied[..., even_first].int().argmax(dim=-1)]
    nibbles = (index + 8 * (torch.signbit(codes)).int()).to(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, (exponents + 127).to(torch.uint8)


def _quantise(rows: Tensor, group: int, largest: float) -> tuple[Tensor, Tensor]:
    """Values divided by their group's power of two, and its exponent: ceil(log2(max(amax, 1e-4) / largest))."""
    grouped = rows.unflatten(1, (-1, group))
    quotient = grouped.abs().amax(dim=-1).clamp_min(1e-4) / largest
    mantissa, exponent = torch.frexp(quotient)
    exponents = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(grouped, -exponents[..., None]).flatten(1), exponents


def decode(data: Tensor, scales: Tensor, entry_format: str) -> Tensor:
    """The values of stored rows: float64 ``[n, width]``."""
    if entry_format in DTYPES:
        return data.contiguous().view(DTYPES[entry_format]).double()
    if entry_format == "fp8_packed":
        plain = data.shape[1] - 128
        values = data[:, :plain].contiguous().view(torch.float8_e4m3fn).double().unflatten(1, (-1, 64))
        values = values * torch.exp2(scales[:, : plain // 64].double() - 127)[..., None]
        return torch.cat([values.flatten(1), data[:, plain:].contiguous().view(torch.bfloat16).double()], dim=1)
    if entry_format == "fp8_index":
        return data.contiguous().view(torch.float8_e4m3fn).double() * scales.contiguous().view(torch.float32).double()
    nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(1)
    values = E2M1.double()[(nibbles & 7).long()] * torch.where(nibbles >= 8, -1.0, 1.0)
    return (values.unflatten(1, (-1, 32)) * torch.exp2(scales.double() - 127)[..., None]).flatten(1)
