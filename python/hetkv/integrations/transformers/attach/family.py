"""What attaching has to know about a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..state import UnsupportedModelError

if TYPE_CHECKING:
    from .... import Cache
    from .paged_cache import PagedCache


class AttachedFamily(ABC):
    """The attention modules of one model, bound to the sections of one cache.

    layers: indices of the model's layers. active: the cache whose `update` ran last, until the attention function has taken it.
    """

    layers: tuple[int, ...]
    active: PagedCache | None = None

    @abstractmethod
    def __init__(self, model: nn.Module, cache: Cache) -> None: ...

    @abstractmethod
    def install(self) -> None:
        """Makes the attention modules compute on blocks."""

    @abstractmethod
    def remove(self) -> None:
        """Undoes `install`."""

    def write_key_value(self, step: PagedCache, layer: int, key: Tensor, value: Tensor) -> None:  # noqa: ARG002
        """Rows that the stock attention hands to `cache.update`: [batch, heads, tokens, head dim]."""
        raise UnsupportedModelError(f"{type(self).__name__} writes its rows itself, not through cache.update")

    def ring_biases(self) -> dict[str, Tensor]:
        """Tail group with overlap to float32 [layers, ratio, 2 * width]; empty without such groups."""
        return {}
