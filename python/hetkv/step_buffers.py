"""The arrays of one step of a batch, allocated once and filled in place by ``Cache.prepare_step``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import _core
from .errors import ArgumentError

if TYPE_CHECKING:
    from .cache import Cache

__all__ = ["StepBuffers"]


class StepBuffers:
    """Host arrays for steps of up to ``max_sequences`` sequences and ``max_tokens`` tokens; the addresses never change.

    block_tables: group name to int32 [max_sequences, blocks]: block offsets in units of 256 bytes. Histories have a column per
        block of the group, windows one per block_size tokens, tails and snapshots one: the running ring or state.
    slots: group name to int64 [max_tokens]: where the row that each token of the step completes is stored, in the order of the
        sequences; the scratch block where it completes none.
    cu_seqlens_q: int32 [max_sequences + 1]: running sum of the tokens of the step.
    seqused_k: int32 [max_sequences]: tokens of each sequence once the step has run; 0 for padding.

    Padding never points at data: rows without a sequence and slots without a token point at scratch blocks.
    """

    def __init__(
        self, cache: Cache, max_sequences: int, max_tokens: int, max_sequence_tokens: int, *, pin_memory: bool = False
    ) -> None:
        """``max_sequence_tokens``: longest sequence, from which the widths of the block tables follow.

        ``pin_memory`` asks torch for page-locked memory, for asynchronous copies to a device.
        """
        for argument, value in (
            ("max_sequences", max_sequences),
            ("max_tokens", max_tokens),
            ("max_sequence_tokens", max_sequence_tokens),
        ):
            if value < 1:
                raise ArgumentError(argument, str(value), "1 or more")
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens

        def array(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=pin_memory)

        layout = cache.layout
        widths = {group.name: _table_width(layout, group, max_sequence_tokens) for group in layout.groups}
        self.block_tables: Mapping[str, Tensor] = MappingProxyType(
            {name: array(max_sequences, width, dtype=torch.int32) for name, width in widths.items()}
        )
        self.slots: Mapping[str, Tensor] = MappingProxyType({name: array(max_tokens, dtype=torch.int64) for name in widths})
        self.cu_seqlens_q = array(max_sequences + 1, dtype=torch.int32)
        self.seqused_k = array(max_sequences, dtype=torch.int32)
        self._core = _core.StepArrays(
            {g.id: (self.block_tables[g.name].numpy(), self.slots[g.name].numpy()) for g in layout.groups},
            self.cu_seqlens_q.numpy(),
            self.seqused_k.numpy(),
            max_tokens,
        )


def _table_width(layout: _core.CacheLayout, group: _core.Group, tokens: int) -> int:
    blocks = -(-tokens // layout.block_size)
    if group.retention is _core.Retention.history:
        ratio = group.compress_ratio
        return max(1, blocks * layout.block_size // ratio if ratio > layout.block_size else blocks)
    return blocks if group.retention is _core.Retention.window else 1
