"""verify_blocks, checksum_blocks, copy_blocks, transfer_blocks: against plain Python, and what they promise."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from hetkv.ops import BlockStatus

MASK = 2**64 - 1
BLOCKS = torch.tensor([3, 0, 5], dtype=torch.int32)


def arena_of(size: int, seed: int = 0) -> Tensor:
    raw = torch.empty(size + 256, dtype=torch.uint8)
    arena = raw.narrow(0, -raw.data_ptr() % 256, size)
    return arena.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def mix(x: int) -> int:
    x ^= x >> 32
    x = x * 0xD6E8FEB86659FD93 & MASK
    x ^= x >> 29
    x = x * 0xA0761D6478BD642F & MASK
    return x ^ x >> 32


def plain_checksum(data: bytes) -> int:
    """The definition of csrc/base/checksum.h, word by word; as int64."""
    total = 0
    for segment in range(-(-len(data) // 8192)):
        part = data[8192 * segment : 8192 * (segment + 1)]
        lanes = [mix(segment * 64 + lane + 1) for lane in range(64)]
        for word in range(-(-len(part) // 8)):
            x = lanes[word % 64] ^ int.from_bytes(part[8 * word : 8 * word + 8].ljust(8, b"\0"), "little")
            x ^= x >> 32
            x = x * 0x9E3779B97F4A7C15 & MASK
            lanes[word % 64] = (x << 32 | x >> 32) & MASK
        total += sum(map(mix, lanes))
    digest = mix((total + mix(len(data))) & MASK)
    return digest - 2**64 if digest >= 2**63 else digest


@pytest.mark.parametrize("size", [1, 7, 8, 9, 512, 1000, 8191, 8192, 8193, 24576, 30001])
def test_the_checksum_is_the_one_defined(size: int) -> None:
    arena = arena_of(size + 1536)
    sums = hetkv.ops.checksum_blocks(arena, BLOCKS[:2], block_bytes=size)
    assert sums.tolist() == [plain_checksum(bytes(arena[b * 256 : b * 256 + size].tolist())) for b in (3, 0)]


def test_every_level_has_the_same_checksum() -> None:
    code = (
        "import torch, hetkv.ops as ops; a = torch.arange(300000).to(torch.uint8);"
        "print(ops.checksum_blocks(a, torch.tensor([0, 1], dtype=torch.int32), block_bytes=299001).tolist())"
    )
    levels = hetkv.ops.CPU_LEVELS[: hetkv.ops.CPU_LEVELS.index(hetkv.ops.cpu_level()) + 1]
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "HETKV_CPU_LEVEL": level}, capture_output=True, text=True, check=True
        ).stdout
        for level in levels
    }
    assert len(printed) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1249), st.integers(1, 2**64 - 1))
def test_a_change_within_one_word_is_always_noticed(word: int, change: int) -> None:
    arena = arena_of(10000)
    before = hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=10000)
    words = arena.view(torch.int64)
    words[word] ^= change - 2**64 if change >= 2**63 else change
    assert not torch.equal(before, hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=10000))


def test_no_pair_of_single_bits_cancels_between_neighbouring_words_of_a_lane() -> None:
    """The pattern that cancels in simpler rounds: one bit of a word and one bit of the next word of the same lane."""
    arena = torch.zeros(1024 + 256, dtype=torch.uint8)
    words = arena[:1024].view(torch.int64)
    before = int(hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=1024))
    bits = [1 << i for i in range(63)] + [-(2**63)]
    for first in bits:
        for second in bits[::5]:
            words[0], words[64] = first, second
            assert int(hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=1024)) != before


def test_the_blind_spot_that_the_definition_states() -> None:
    """Three bits in two words of a lane cancel whatever the data: no stronger promise may be written down."""
    arena = arena_of(8192)
    before = hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=8192)
    words = arena.view(torch.int64)
    words[5] ^= -(2**63) | 1 << 31
    assert not torch.equal(before, hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=8192))
    words[5 + 64] ^= 1 << 31
    assert torch.equal(before, hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=8192))


def test_lengths_differ_even_for_zeros() -> None:
    arena = torch.zeros(8192, dtype=torch.uint8)
    sums = {int(hetkv.ops.checksum_blocks(arena, BLOCKS[1:2], block_bytes=n)) for n in range(1, 600)}
    assert len(sums) == 599


def test_each_check_sets_its_bit_and_no_other() -> None:
    arena = arena_of(256 * 8)
    arena.view(torch.float32)[:] = 1.0
    arena[3 * 256 + 40 : 3 * 256 + 48] = 0
    arena[40:48] = 0
    arena[5 * 256 + 40 : 5 * 256 + 48] = 0
    checks: dict[str, Any] = {
        "block_bytes": 512,
        "checksums": hetkv.ops.checksum_blocks(arena, BLOCKS, block_bytes=512),
        "zero_ranges": torch.tensor([[40, 48]]),
        "finite_ranges": torch.tensor([[0, 40, 0], [48, 512, 0]]),
        "base_alignment": 256,
        "stride_alignment": 512,
    }

    def status(**changes: Any) -> list[BlockStatus]:
        return [BlockStatus(bits) for bits in hetkv.ops.verify_blocks(arena, BLOCKS, **{**checks, **changes}).tolist()]

    good = BlockStatus(0)
    assert status() == [good] * 3
    assert status(base_alignment=4096)[0] == BlockStatus.MISALIGNED
    assert status(stride_alignment=1024) == [BlockStatus.STRIDE] * 3
    assert status(checksums=checks["checksums"] + torch.tensor([0, 1, 0])) == [good, BlockStatus.CHECKSUM, good]
    arena[5 * 256 + 47] = 1
    assert status() == [good, good, BlockStatus.PADDING | BlockStatus.CHECKSUM]
    arena[5 * 256 + 47] = 0
    for value in (float("inf"), float("-inf"), float("nan")):
        arena.view(torch.float32)[3 * 64 + 100] = value
        assert status() == [BlockStatus.NOT_FINITE | BlockStatus.CHECKSUM, good, good]
    outside = hetkv.ops.verify_blocks(arena, torch.tensor([-1, 2**31 - 1, 7, 6], dtype=torch.int32), block_bytes=512).tolist()
    assert outside == [BlockStatus.OUTSIDE, BlockStatus.OUTSIDE, BlockStatus.OUTSIDE, good]


@pytest.mark.parametrize(
    ("code", "good", "bad"),
    [
        (1, 0x7BFF, 0x7C00),
        (1, 0xFBFF, 0xFE01),
        (2, 0x7F7F, 0x7F80),
        (2, 0xFF7F, 0xFFC0),
        (3, 0x7E7E, 0x7F00),
        (3, 0xFEFE, 0x00FF),
    ],
)
def test_non_finite_values_of_narrow_types(code: int, good: int, bad: int) -> None:
    arena = torch.zeros(256, dtype=torch.uint8)
    for bits, expected in ((good, 0), (bad, BlockStatus.NOT_FINITE)):
        arena[10], arena[11] = bits & 255, bits >> 8
        result = hetkv.ops.verify_blocks(arena, BLOCKS[1:2], block_bytes=256, finite_ranges=torch.tensor([[8, 20, code]]))
        assert result.tolist() == [expected]


@pytest.mark.parametrize("size", [1, 100, 256, 5000, 32768, 100001])
@pytest.mark.parametrize("begin", [0, 13])
def test_copies_are_exact_and_touch_nothing_else(size: int, begin: int) -> None:
    units = (size + begin) // 256 + 1
    arena, other = arena_of(6 * units * 256), arena_of(6 * units * 256, 1)
    source = torch.tensor([0, 2 * units, 0], dtype=torch.int32)
    target = torch.tensor([units, 3 * units, 5 * units], dtype=torch.int32)
    expected, moved = arena.clone(), other.clone()
    for s, t in zip(source.tolist(), target.tolist(), strict=True):
        part = arena[s * 256 + begin : s * 256 + begin + size].clone()
        expected[t * 256 + begin : t * 256 + begin + size] = part
        moved[t * 256 + begin : t * 256 + begin + size] = part
    hetkv.ops.transfer_blocks(other, arena, source, target, num_bytes=size, begin=begin)
    assert torch.equal(other, moved)
    hetkv.ops.copy_blocks(arena, source, target, num_bytes=size, begin=begin)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("shift", [1, 3, 127])
@pytest.mark.parametrize("backwards", [False, True])
def test_the_parts_of_a_pair_may_overlap(shift: int, backwards: bool) -> None:
    arena = arena_of(256 * 400)
    source, target = (shift, 0) if backwards else (0, shift)
    part = arena[source * 256 : source * 256 + 40000].clone()
    hetkv.ops.copy_blocks(
        arena, torch.tensor([source], dtype=torch.int32), torch.tensor([target], dtype=torch.int32), num_bytes=40000
    )
    assert torch.equal(arena[target * 256 : target * 256 + 40000], part)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("source", "target", "settings_", "message"),
    [
        (offsets(0, 1), offsets(1, 2), {}, r"target\[0\] = 1: expected a part that no other pair"),
        (offsets(0, 1), offsets(3, 3), {}, r"target\[\d\] = 3"),
        (offsets(0), offsets(8), {}, r"target\[0\] = 8"),
        (offsets(-1), offsets(0), {}, r"source\[0\] = -1"),
        (offsets(0), offsets(1, 2), {}, r"target.size\(0\)"),
        (offsets(0).long(), offsets(1), {}, "source.dtype"),
        (offsets(0), offsets(1), {"num_bytes": 0}, "num_bytes = 0"),
        (offsets(0), offsets(1), {"num_bytes": 2**62}, "num_bytes"),
        (offsets(0), offsets(1), {"begin": -1}, "begin = -1"),
    ],
)
def test_copy_refusals_write_nothing(source: Tensor, target: Tensor, settings_: dict[str, int], message: str) -> None:
    arena = arena_of(256 * 8)
    before = arena.clone()
    with pytest.raises(ValueError, match=f"copy_blocks: {message}"):
        hetkv.ops.copy_blocks(arena, source, target, **{"num_bytes": 256, **settings_})
    assert torch.equal(arena, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_bytes": 0}, "block_bytes = 0"),
        ({"base_alignment": 3}, "base_alignment = 3"),
        ({"zero_ranges": torch.tensor([[0, 600]])}, r"zero_ranges\[0\]"),
        ({"finite_ranges": torch.tensor([[4, 2, 0]])}, r"finite_ranges\[0\]"),
        ({"finite_ranges": torch.tensor([[0, 4, 9]])}, r"finite_ranges\[0, 2\] = 9"),
        ({"finite_ranges": torch.tensor([[1, 5, 0], [0, 3, 1]])}, r"finite_ranges\[1\] = 3 bytes"),
        ({"checksums": torch.zeros(2, dtype=torch.int64)}, r"checksums.size\(0\)"),
        ({"blocks": BLOCKS.long()}, "blocks.dtype"),
    ],
)
def test_verify_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"verify_blocks: {message}"):
        hetkv.ops.verify_blocks(**{"arena": arena_of(2048), "blocks": BLOCKS, "block_bytes": 512, **change})


def test_other_refusals() -> None:
    arena = arena_of(2048)
    with pytest.raises(ValueError, match=r"checksum_blocks: blocks\[1\] = 8"):
        hetkv.ops.checksum_blocks(arena, offsets(0, 8), block_bytes=256)
    with pytest.raises(ValueError, match="memory shared"):
        hetkv.ops.transfer_blocks(arena, arena, offsets(0), offsets(1), num_bytes=256)


def test_opcheck() -> None:
    arena, other = arena_of(2048), arena_of(2048, 1)
    torch.library.opcheck(torch.ops.hetkv.verify_blocks.default, (arena, BLOCKS), {"block_bytes": 256})
    torch.library.opcheck(torch.ops.hetkv.checksum_blocks.default, (arena, BLOCKS), {"block_bytes": 256})
    torch.library.opcheck(torch.ops.hetkv.copy_blocks.default, (arena, offsets(0), offsets(2)), {"num_bytes": 256})
    torch.library.opcheck(torch.ops.hetkv.transfer_blocks.default, (other, arena, offsets(0), offsets(2)), {"num_bytes": 256})


def test_compile() -> None:
    def step(arena: Tensor) -> tuple[Tensor, Tensor]:
        hetkv.ops.copy_blocks(arena, offsets(0), offsets(2), num_bytes=256)
        return hetkv.ops.checksum_blocks(arena, BLOCKS, block_bytes=256), hetkv.ops.verify_blocks(arena, BLOCKS, block_bytes=256)

    eager, compiled = arena_of(2048), arena_of(2048)
    expected, found = step(eager), torch.compile(step, fullgraph=True, backend="aot_eager")(compiled)
    assert torch.equal(eager, compiled)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
