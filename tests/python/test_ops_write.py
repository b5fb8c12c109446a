"""write_rows and write_key_value against plain torch: formats, norm, both rotations; byte-exact where nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hetkv.ops
from paged_world import Section, World, section
from reference import formats
from reference.compress import rms_norm, rotate_trailing_pairs

WIDTHS = {"fp8_packed": 192, "fp8_index": 128, "mxfp4_index": 96}
FORMATS = (*formats.DTYPES, *formats.PACKED)


def arguments(where: Section) -> dict[str, Any]:
    return {
        "rows_per_block": where.rows_per_block,
        "section_offset": where.offset,
        "entry_format": where.entry_format,
        "scale_offset": where.scale_offset,
    }


def written(world: World, where: Section, table: Tensor, count: int) -> list[tuple[bytes, bytes]]:
    return [tuple(bytes(part.tolist()) for part in world.get(where, table[0], row)) for row in range(count)]  # type: ignore[misc]


@pytest.mark.parametrize("entry_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_rows_are_the_bytes_of_the_reference(entry_format: str, dtype: torch.dtype) -> None:
    width = WIDTHS.get(entry_format, 40)
    where = section(entry_format, width, 4)
    world = World(1, 8, where.end)
    table = world.table([9], 4)
    rows = (world.randn(9, width) * torch.exp2(world.randn(9, 1) * 4)).to(dtype)
    before = world.arena.clone()
    hetkv.ops.write_rows(world.arena, rows, world.slots(table[0], range(9), 4), **arguments(where))
    result = written(world, where, table, 9)
    touched = world.arena.clone()
    world.arena.copy_(before)
    world.put(where, table[0], rows.float())
    assert result == written(world, where, table, 9)
    assert torch.equal(touched, world.arena)  # and not one byte more


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(1, 3),
    st.sampled_from([8, 20, 64, 96]),
    st.integers(0, 4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_norm_and_rotation(  # noqa: PLR0917  # drawn by hypothesis
    entry_format: str, heads: int, width: int, rope: int, normed: bool, interleaved: bool, trailing: bool, seed: int
) -> None:
    where = section(entry_format, width, 2, heads=heads)
    world = World(seed, 6, where.end)
    table = world.table([5], 2)
    rows = world.randn(5, heads, width)
    weight = world.randn(width) if normed else None
    angle = world.randn(5, rope)
    rotated = {"cos": angle.cos(), "sin": angle.sin()} if rope else {}
    hetkv.ops.write_rows(
        world.arena,
        rows,
        world.slots(table[0], range(5), 2),
        **arguments(where),
        norm_weight=weight,
        norm_eps=1e-5,
        **rotated,
        rope_interleaved=interleaved,
        rope_trailing=trailing,
    )
    expected = rows.double()
    if weight is not None:
        expected = rms_norm(expected, weight.double(), 1e-5)
    expected = rotate(expected, angle.double(), interleaved, trailing)
    bound = 1e-6 if entry_format == "float32" else 2**-8
    for row in range(5):
        got = world.values(where, table[0], row).view(heads, width)
        torch.testing.assert_close(got, expected[row], rtol=bound, atol=bound * float(expected[row].abs().max()))


def rotate(rows: Tensor, angle: Tensor, interleaved: bool, trailing: bool) -> Tensor:
    rope = 2 * angle.shape[1]
    if rope == 0:
        return rows
    part = rows[..., -rope:] if trailing else rows[..., :rope]
    if not interleaved:
        part = part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    part = rotate_trailing_pairs(part, angle.cos()[:, None], angle.sin()[:, None])
    if not interleaved:
        part = part.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([rows[..., :-rope], part] if trailing else [part, rows[..., rope:]], dim=-1)


def test_every_bfloat16_becomes_the_code_that_torch_gives() -> None:
    """All finite values, one per group of 64 with a 448 beside it, so that the scale is 1."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[every.isfinite() & (every.abs() <= 448)]
    where = section("fp8_packed", 128, 64)
    world = World(2, -(-len(every) // 64), where.end)
    table = world.table([len(every)], 64)
    rows = torch.zeros(len(every), 128)
    rows[:, 0], rows[:, 1] = every, 448.0
    hetkv.ops.write_rows(world.arena, rows, world.slots(table[0], range(len(every)), 64), **arguments(where))
    base = table[0].long() * 256 + where.offset
    codes = torch.cat([world.arena[base[r // 64] + r % 64 * where.row_bytes][None] for r in range(len(every))])
    assert torch.equal(codes, every.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("entry_format", formats.PACKED)
def test_requantising_a_stored_row_keeps_its_values(entry_format: str) -> None:
    where = section(entry_format, WIDTHS[entry_format], 8)
    world = World(3, 30, where.end)
    table = world.table([200], 8)
    rows = world.randn(200, where.width) * torch.exp2(world.randn(200, 1) * 3)
    slots = world.slots(table[0], range(200), 8)
    hetkv.ops.write_rows(world.arena, rows, slots, **arguments(where))
    once = torch.stack([world.values(where, table[0], row) for row in range(200)])
    hetkv.ops.write_rows(world.arena, once.float(), slots, **arguments(where))
    assert torch.equal(once, torch.stack([world.values(where, table[0], row) for row in range(200)]))


def test_nan_is_stored_as_the_nan_code() -> None:
    where = section("fp8_packed", 128, 1)
    world = World(4, 2, where.end)
    table = world.table([1], 1)
    rows = torch.ones(1, 128)
    rows[0, 5] = float("nan")
    hetkv.ops.write_rows(world.arena, rows, world.slots(table[0], [0], 1), **arguments(where))
    assert int(world.get(where, table[0], 0)[0][5]) == 0x7F


def test_keys_and_values_go_to_their_sections_and_only_keys_turn() -> None:
    key_section = section("float32", 16, 4, heads=2)
    value_section = section("float32", 16, 4, offset=-(-key_section.end // 16) * 16, heads=2)
    world = World(5, 4, value_section.end)
    table = world.table([6], 4)
    key, value, angle = world.randn(6, 2, 16), world.randn(2, 6, 16).transpose(0, 1), world.randn(6, 8)
    hetkv.ops.write_key_value(
        world.arena,
        key,
        value,
        world.slots(table[0], range(6), 4),
        rows_per_block=4,
        key_offset=key_section.offset,
        value_offset=value_section.offset,
        entry_format="float32",
        cos=angle.cos(),
        sin=angle.sin(),
    )
    turned = rotate(key.double(), angle.double(), False, True)
    for row in range(6):
        torch.testing.assert_close(world.values(key_section, table[0], row).view(2, 16), turned[row], rtol=1e-6, atol=1e-6)
        assert torch.equal(world.values(value_section, table[0], row).view(2, 16), value[row].double())


def call(**changes: Any) -> None:
    where = section("float32", 16, 4)
    world = World(6, 4, where.end)
    table = world.table([3], 4)
    given_arguments: dict[str, Any] = {
        "arena": world.arena,
        "rows": world.randn(3, 16),
        "slots": world.slots(table[0], range(3), 4),
        **arguments(where),
    }
    given_arguments.update({name: change(given_arguments) if callable(change) else change for name, change in changes.items()})
    before = given_arguments["arena"].clone()
    try:
        hetkv.ops.write_rows(**given_arguments)
    except ValueError:
        assert torch.equal(before, given_arguments["arena"])
        raise


def test_a_skipped_slot_and_no_rows_write_nothing() -> None:
    where = section("float32", 16, 4)
    world = World(7, 4, where.end)
    before = world.arena.clone()
    hetkv.ops.write_rows(world.arena, world.randn(2, 16), torch.tensor([-1, -1]), **arguments(where))
    hetkv.ops.write_rows(world.arena, world.randn(0, 16), torch.empty(0, dtype=torch.int64), **arguments(where))
    assert torch.equal(before, world.arena)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arena": lambda a: a["arena"].float()}, "arena.dtype"),
        ({"rows": torch.zeros(3, 16, dtype=torch.float64)}, "rows.dtype"),
        ({"rows": torch.zeros(3, 32)[:, ::2]}, r"rows.stride\(1\)"),
        ({"rows": torch.zeros(3)}, "rows.ndim"),
        ({"rows": torch.zeros(3, 2048)}, "rows.shape"),
        ({"rows": torch.zeros(3, 1, 4).expand(3, 2**58, 4)}, "rows.shape"),  # bytes of a row would wrap to 0
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots.size\(0\)"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots.dtype"),
        ({"slots": torch.tensor([12, -2, 13])}, r"slots\[1\] = -2"),
        ({"slots": torch.tensor([12, 13, 2**40])}, r"slots\[2\]"),
        ({"rows_per_block": 3}, "rows_per_block = 3"),
        ({"section_offset": -1}, "section_offset = -1"),
        ({"section_offset": 2}, "section_offset = 2"),
        ({"section_offset": 2**62}, "section_offset"),
        ({"entry_format": "fp7"}, "entry_format = fp7"),
        ({"entry_format": "fp8_packed"}, "entry_format = fp8_packed"),
        ({"norm_weight": torch.ones(15)}, "norm_weight"),
        ({"cos": torch.ones(3, 4)}, "sin = None"),
        ({"cos": torch.ones(3, 9), "sin": torch.ones(3, 9)}, r"cos.size\(1\) = 9"),
        ({"rows": torch.zeros(3, 16, requires_grad=True)}, "rows.requires_grad"),
        ({"norm_weight": torch.ones(16, requires_grad=True)}, "norm_weight.requires_grad"),
    ],
)
def test_refusals_name_op_and_argument_and_write_nothing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"write_rows: {message}"):
        call(**change)


def test_far_offsets_are_widened_before_they_are_scaled() -> None:
    """A block beyond 2^31 bytes: the arena is address space without memory, but for the pages that are written."""
    size = 3 * 2**31
    arena = torch.empty(size, dtype=torch.uint8)
    block = size // 256 - 4
    hetkv.ops.write_rows(
        arena, torch.ones(1, 16), torch.tensor([block * 4 + 1]), rows_per_block=4, section_offset=0, entry_format="float32"
    )
    assert torch.equal(arena[block * 256 + 64 : block * 256 + 128].view(torch.float32), torch.ones(16))


@pytest.mark.parametrize("entry_format", ["float32", "fp8_packed"])
def test_opcheck_and_compile(entry_format: str) -> None:
    where = section(entry_format, 128, 4)
    world = World(8, 4, where.end)
    table = world.table([3], 4)
    slots = world.slots(table[0], range(3), 4)
    rows, angle, weight = world.randn(3, 128), world.randn(3, 4), world.randn(128)
    settings_ = {**arguments(where), "norm_weight": weight, "cos": angle.cos(), "sin": angle.sin()}
    torch.library.opcheck(torch.ops.hetkv.write_rows.default, (world.arena, rows, slots), settings_)
    hetkv.ops.write_rows(world.arena, rows, slots, **settings_)
    eager = world.arena.clone()
    world.arena.fill_(0xFF)
    torch.compile(lambda a, r, s: hetkv.ops.write_rows(a, r, s, **settings_), fullgraph=True, backend="aot_eager")(
        world.arena, rows, slots
    )
    assert torch.equal(eager, world.arena)
