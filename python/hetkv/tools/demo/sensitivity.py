"""Shows that the comparison has teeth: one zeroed row in the arena changes the logits visibly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...integrations.transformers import GroupState, Retention
from ...integrations.transformers.rows import RowStore
from .results import Sensitivity

if TYPE_CHECKING:
    import hetkv

    from .serving import ServedModel

_TOKENS = 160


def measure(served: ServedModel, prompt: list[int]) -> Iterator[Sensitivity]:
    """Zeroes one row of each group of a resume state in turn, in all layers of the group, and puts it back.

    The state is the prompt's or, if only that has tail rows, the one at the end of its answer. Nothing is published from the
    damaged state. Yields nothing if neither can be resumed from anywhere.
    """
    answered = [*prompt, *served.last_answer]
    tokens = max((prompt, answered), key=lambda tokens: _num_tail_rows(served, tokens))
    with served.cache.admit(tokens) as sequence:
        position = sequence.num_computed_tokens
        rows = RowStore(served.adapter, served.cache, sequence)
        following = [*answered, *prompt][position : position + _TOKENS]

        def logits() -> Tensor:
            return served.runner.step(rows.restore(position), following, keep=0)

        if position == 0:
            return
        intact = logits()
        for group in served.adapter.groups:
            found = _one_row(served.cache, sequence, group, position)
            if found is None:
                continue
            field, slot, name = found
            saved = served.cache.read_rows(group.name, field, [slot])
            served.cache.write_rows(group.name, field, [slot], torch.zeros_like(saved))
            try:
                change = float((logits() - intact).abs().max())
            finally:
                served.cache.write_rows(group.name, field, [slot], saved)
            yield Sensitivity(group.name, name, change)


def _num_tail_rows(served: ServedModel, tokens: list[int]) -> int:
    """Raw tail rows, over all groups, of the state that `tokens` could resume from now."""
    position = served.cache.probe(tokens).num_recoverable_tokens
    needs = [group.need(position) for group in served.adapter.groups if group.retention is Retention.TAIL]
    return sum(end - begin for begin, end in needs)


def _one_row(cache: hetkv.Cache, sequence: hetkv.Sequence, group: GroupState, position: int) -> tuple[str, int, str] | None:
    """Field, slot and description of a row in the middle of what R(position) asks of the group; None if that is nothing."""
    begin, end = group.need(position)
    field = group.fields[0]
    if group.retention in (Retention.HISTORY, Retention.WINDOW):
        row = (begin + end) // 2
        slot = int(sequence.slot_mapping(group.name, row, row + 1)[0])
        return field, slot, f"{field} {'entry' if group.ratio > 1 else 'row'} {row} of [{begin}, {end})"
    offset = sequence.point_block(group.name)
    if offset is None:
        return None
    row = (end - begin) // 2
    if group.retention is Retention.TAIL and begin == end:
        field, row = "overlap_kv", 0
    return field, offset * cache.layout.group(group.name).field(field).rows_per_block + row, f"{field} row {row}"
