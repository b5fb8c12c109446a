"""Where one layer's rows lie inside a block: the integers that ops take, from the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .... import CacheLayout


@dataclass(frozen=True)
class Section:
    """One field of one layer of a group. offset: bytes from a block's start to row 0. format: `entry_format` of the ops."""

    group: str
    rows_per_block: int
    offset: int
    format: str


def section_of(layout: CacheLayout, group_name: str, field_name: str, layer: int) -> Section:
    """The section of model layer `layer`, which the group must own."""
    group = layout.group(group_name)
    field = group.field(field_name)
    offset = group.layers.index(layer) * group.layer_stride + field.section_offset
    return Section(group_name, field.rows_per_block, offset, field.dtype.name)


@dataclass(frozen=True)
class Ring:
    """The running ring of one layer of a tail group: raw `kv` and `gate` rows by position modulo `rows`."""

    group: str
    rows: int
    kv_offset: int
    gate_offset: int


def ring_of(layout: CacheLayout, group_name: str, layer: int) -> Ring:
    """The ring of model layer `layer`, which the tail group must own."""
    group = layout.group(group_name)
    kv, gate = group.field("kv"), group.field("gate")
    base = group.layers.index(layer) * group.ring_layer_stride
    return Ring(group_name, kv.ring_rows, base + kv.ring_section_offset, base + gate.ring_section_offset)
