"""What `prepare_step` must have written, from the plain model's tables and the sequences' own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hetkv
from model.plain_layout import PlainGroup, PlainLayout

if TYPE_CHECKING:
    from request_machine import Live


def check_tables(
    cache: hetkv.Cache, plain: PlainLayout, buffers: hetkv.StepBuffers, group: PlainGroup, batch: list[Live]
) -> None:
    """The block tables of a step: real blocks exactly where the plain model has some, shared ones where it shares."""
    tables = buffers.block_tables[group.name].tolist()
    # Running tails lie in rings, a pool of their own with a scratch block that only padding tells.
    scratch = tables[-1][0] if group.retention == "tail" else cache.scratch_block(group.name)
    assert all(set(table) == {scratch} for table in tables[len(batch) :])
    if group.retention not in ("history", "window"):
        assert [table[0] for table in tables[: len(batch)]] == [
            scratch if (own := one.real.live_block(group.name)) is None else own for one in batch
        ]
        return
    private: list[set[int]] = []
    for one, table in zip(batch, tables, strict=False):
        own = one.real.block_table(group.name).tolist()
        assert table == own + [scratch] * (len(table) - len(own))
        held = [block for block in table if block != scratch]
        assert len(set(held)) == len(held), f"one block of {group.name} in two places"
        if one.model is None:
            continue
        if group.retention == "history":
            expected = set(range(plain.table_blocks(group, one.model.covered)))
            published = plain.table_blocks(group, one.model.published * plain.block_size)
            private.append(set(table[published : len(expected)]))
        else:
            expected = set(one.model.windows[group.name])
            private.append({table[i] for i, whose in one.model.windows[group.name].items() if whose == "private"})
        assert {i for i, block in enumerate(table) if block != scratch} == expected, f"table of {group.name}"
    for i, mine in enumerate(private):
        assert all(mine.isdisjoint(table) for j, table in enumerate(tables[: len(batch)]) if j != i)
    if group.retention == "history" and private:
        for a, x in zip(batch, tables, strict=False):
            for b, y in zip(batch, tables, strict=False):
                assert a.model is not None
                assert b.model is not None
                both = min(a.model.resume, b.model.resume) // plain.block_size
                same = sum(m is n for m, n in zip(a.model.chain[:both], b.model.chain[:both], strict=True))
                shared = plain.table_blocks(group, same * plain.block_size)
                assert x[:shared] == y[:shared], f"blocks of {group.name} that both were admitted with"


def check_slots(cache: hetkv.Cache, buffers: hetkv.StepBuffers, group: PlainGroup, batch: list[Live], steps: list[range]) -> None:
    """The slot of every token of a step: that of the row which it completes, else the scratch block's."""
    told = buffers.slots[group.name].tolist()
    per_block = cache.layout.group(group.name).entries_per_block
    expected: list[int] = []
    for one, step in zip(batch, steps, strict=True):
        if group.retention not in ("history", "window"):
            expected += one.real.token_slots(group.name, step.start, step.stop).tolist()
            continue
        table = one.real.block_table(group.name).tolist()
        for t in step:
            row = t // group.ratio
            done = (t + 1) % group.ratio == 0
            block = table[row // per_block] if done else cache.scratch_block(group.name)
            expected.append(block * per_block + (row % per_block if done else 0))
    assert told[: len(expected)] == expected, f"slots of {group.name}"
    rest = set(told[len(expected) :])
    assert len(rest) == 1
    if group.retention in ("history", "window"):
        assert rest == {cache.scratch_block(group.name) * per_block}
