"""Checksums beside a read sweep, block copies beside Tensor.copy_ of the same blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import hetkv.ops

from .timing import Line, beside

SIZE = 256 * 2**20


def lines(repeats: int) -> Iterator[Line]:
    """256 MiB in blocks of 64 KiB and 256 KiB, in random order."""
    arena, other = torch.ones(SIZE, dtype=torch.uint8), torch.zeros(SIZE, dtype=torch.uint8)
    for kib in (16, 64, 256):
        size = kib * 1024
        count = SIZE // size
        blocks = (torch.randperm(count) * (size // 256)).int()
        target = (torch.randperm(count) * (size // 256)).int()
        if kib != 16:
            yield beside(
                f"checksum, blocks of {kib} KiB",
                lambda blocks=blocks, size=size: hetkv.ops.checksum_blocks(arena, blocks, block_bytes=size),
                "a sum over the bytes (read sweep)", lambda: arena.view(torch.int64).sum(),
                amount=SIZE, unit="GB/s", device="cpu", repeats=repeats,
            )  # fmt: skip
        pairs = list(zip(blocks.tolist(), target.tolist(), strict=True))

        def copies(pairs: list[tuple[int, int]] = pairs, size: int = size) -> None:
            for source, to in pairs:
                other[to * 256 : to * 256 + size].copy_(arena[source * 256 : source * 256 + size])

        yield beside(
            f"transfer, blocks of {kib} KiB",
            lambda source=blocks, to=target, size=size: hetkv.ops.transfer_blocks(other, arena, source, to, num_bytes=size),
            "Tensor.copy_, block by block", copies, amount=2 * SIZE, unit="GB/s", device="cpu", repeats=repeats,
        )  # fmt: skip
