"""What an engine would write: every row's content says which prefix, group, field and layer it belongs to.

A row read back anywhere else, or after other tokens, differs. Values are a rolling hash of the tokens up to the row's end.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

import hetkv

from .plain_layout import PlainGroup, PlainLayout

__all__ = ["LAYERS", "WIDTH", "RowWriter", "build_layout"]

LAYERS = (0, 2)
WIDTH = 2  # int64 values of a row
_MASK = (1 << 64) - 1
_POISON = 0x5DEECE66D
_PLACES = np.array([[[7919 * layer + w for w in range(WIDTH)]] for layer in LAYERS], dtype=np.uint64)  # [layers, 1, WIDTH]


def build_layout(plain: PlainLayout) -> hetkv.CacheLayout:
    """The same layout for hetkv: two layers, one field of rows of two int64 values, and one of overlap rows where needed."""
    groups = []
    for g in plain.groups:
        fields = [hetkv.FieldSpec("row", hetkv.DType.int64, [WIDTH])]
        if g.overlap_rows:
            fields.append(hetkv.FieldSpec("overlap", hetkv.DType.int64, [WIDTH], overlap=True))
        groups.append(
            hetkv.GroupSpec(
                g.name,
                getattr(hetkv.ObjectKind, g.kind),
                getattr(hetkv.Retention, g.retention),
                owner_layers=LAYERS,
                fields=fields,
                compress_ratio=g.ratio,
                window=g.window,
                overlap_rows=g.overlap_rows,
                indexes=g.indexes,
            )
        )
    return hetkv.CacheLayout.build(plain.name, plain.block_size, groups)


class RowWriter:
    """The rows of one conversation. ``identity`` is what must not be shared: weights, namespace and its life."""

    def __init__(self, layout: PlainLayout, identity: object) -> None:
        self._layout = layout
        self._hashes = [zlib.crc32(repr(identity).encode())]  # of the first i tokens

    def extend(self, tokens: list[int]) -> None:
        """``tokens``: the whole conversation so far."""
        for token in tokens[len(self._hashes) - 1 :]:
            self._hashes.append((self._hashes[-1] * 6364136223846793005 + token + 1442695040888963407) & _MASK)

    def _values(self, group: PlainGroup, field: str, ends: Iterable[int], rows: Iterable[int] | int, poison: int) -> Tensor:
        """[layers, n, WIDTH]; ends: tokens below each row's end; rows: which of those that end there."""
        salt = zlib.crc32(f"{group.name}/{field}".encode())
        hashes = np.array([self._hashes[end] for end in ends], dtype=np.uint64)
        row = np.asarray(rows if isinstance(rows, int) else list(rows), dtype=np.uint64)
        base = hashes * np.uint64(0x9E3779B97F4A7C15) + np.uint64(97) * row
        return torch.from_numpy(((base[None, :, None] + _PLACES + np.uint64(salt)) ^ np.uint64(poison)).view(np.int64))

    def rows(self, group: PlainGroup, begin: int, end: int, poison: int = 0) -> Tensor:
        """Rows [begin, end) of a history, window or tail group."""
        span = group.ratio if group.retention == "history" else 1
        return self._values(group, "row", range((begin + 1) * span, (end + 1) * span, span), 0, poison)

    def state(self, group: PlainGroup, p: int, poison: int = 0) -> dict[str, Tensor]:
        """What the block of a tail or snapshot group holds at p, by field."""
        if group.retention == "snapshot":
            return {"row": self._values(group, "row", [p], 0, poison)}
        rows = self._layout.rows(group, p)
        fields = {"row": self.rows(group, rows.start, rows.stop, poison)} if rows else {}
        if overlap := self._layout.overlap(group, p):
            closed = p // group.ratio * group.ratio
            fields["overlap"] = self._values(group, "overlap", [closed] * overlap, range(overlap), poison)
        return fields

    # --- what the engine does with a cache ---

    def write_step(self, cache: hetkv.Cache, seq: hetkv.Sequence, begin: int, end: int, foreign: bool) -> None:
        """The rows of tokens [begin, end), as the device would write them; foreign: with other weights than the sequence's."""
        poison = _POISON if foreign else 0
        for group in self._layout.groups:
            if group.retention not in ("history", "window"):
                continue
            first, last = begin // group.ratio, end // group.ratio
            cache.write_rows(group.name, "row", seq.slot_mapping(group.name, first, last), self.rows(group, first, last, poison))

    def write_state(self, cache: hetkv.Cache, group: PlainGroup, offset: int, p: int, foreign: bool) -> None:
        for name, rows in self.state(group, p, _POISON if foreign else 0).items():
            cache.write_block(group.name, name, offset, rows)

    def check_rows(self, cache: hetkv.Cache, seq: hetkv.Sequence, upto: int, limit: int | None = None) -> None:
        """All rows that a query at ``upto`` reads are there, and are this conversation's. Only rows of tokens below ``limit``."""
        for group in self._layout.groups:
            if group.retention not in ("history", "window"):
                continue
            rows = self._layout.rows(group, upto)
            begin, end = rows.start, max(rows.start, rows.stop if limit is None else min(rows.stop, limit // group.ratio))
            read = cache.read_rows(group.name, "row", seq.slot_mapping(group.name, begin, end))
            assert torch.equal(read, self.rows(group, begin, end)), f"rows of {group.name} below {upto}"

    def check_resume(self, cache: hetkv.Cache, seq: hetkv.Sequence) -> None:
        """R(p) at num_computed_tokens, bit for bit."""
        p = seq.num_computed_tokens
        self.check_rows(cache, seq, p)
        for group in self._layout.staged:
            offset = seq.point_block(group.name)
            assert (offset is None) == (not self._layout.objects(group, p // self._layout.block_size))
            if offset is None:
                continue
            for name, rows in self.state(group, p).items():
                assert torch.equal(cache.read_block(group.name, name, offset, rows.shape[1]), rows), (
                    f"{name} of {group.name} at {p}"
                )
