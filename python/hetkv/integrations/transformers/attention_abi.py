"""Whose attention computes a cache's rows: transformers' own, or hetkv's ops on the blocks.

Their rows differ in the last bits, so a cache takes one of them at a time, as a family of its kernel ABI: entries of the other
stop matching, and match again when it comes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .state import UnsupportedModelError

if TYPE_CHECKING:
    from ... import Cache

ATTENTION_FAMILY = "attention"
STOCK = 0
ON_BLOCKS = 1


def check_attention(cache: Cache, wanted: int) -> None:
    """UnsupportedModelError if the cache has meanwhile been given to the other one."""
    if cache.abi.get(ATTENTION_FAMILY) != wanted:
        other = "an attached model" if wanted == STOCK else "a PrefixCache"
        raise UnsupportedModelError(f"the cache is used by {other} now; give each a cache of its own")
