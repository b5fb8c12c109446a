"""What an attached model gets as `cache=`: the tables of one step of a batch. No rows live here, they are in the arena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.cache_utils import Cache as TransformersCache

from ..state import UnsupportedModelError

if TYPE_CHECKING:
    from .attached_model import AttachedModel, AttachedRequest


class PagedCache(TransformersCache):  # type: ignore[misc]  # transformers' class is untyped for mypy
    """Block tables, slots and lengths of the step that an attached model is about to run, for the sequences of `requests`.

    Made by `AttachedModel`; the tensors are filled in place or replaced by every step. Owns nothing: arena and tables belong to
    the attached model, blocks to the requests. What has no meaning on shared blocks (`crop`, `reorder_cache`, ...) is refused.

    arena: uint8 [bytes]. block_tables, slots: by group, int32 [batch, columns] and int64 [tokens]. cu_seqlens_q: int32
    [batch + 1]. seqused_k: int32 [batch]. num_tokens: of each request in the step.
    in_step: `AttachedModel.step` prepares and settles; otherwise every pass of the model does. ready: prepared, and not settled
    yet; only then may a pass write.
    """

    def __init__(self, attached: AttachedModel, requests: tuple[AttachedRequest, ...], *, in_step: bool = False) -> None:
        super().__init__(layers=[])
        self.in_step = in_step
        self.ready = False
        self.num_tokens: list[int] = []
        self.attached = attached
        self.requests = requests
        self.arena: Tensor = attached.cache.arena
        self.block_tables: Mapping[str, Tensor] = {}
        self.slots: Mapping[str, Tensor] = {}
        self.cu_seqlens_q: Tensor
        self.seqused_k: Tensor

    def check_ready(self) -> None:
        """UnsupportedModelError if this pass has no step: its slots would be those of an earlier one, whose rows are settled."""
        if not self.ready:
            raise UnsupportedModelError(
                "the cache has no step for this pass: call the attached model itself, with the cache as a keyword, "
                "or stay inside `with attached.step(...)`"
            )

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Writes the step's rows into blocks. Returns them as they came: attention reads the blocks."""
        self.check_ready()
        family = self.attached.family
        family.write_key_value(self, layer_idx, key_states, value_states)
        family.active = self  # for the attention function, which transformers calls next, without the cache
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Tokens that every sequence holds. UnsupportedModelError if they differ: such a batch goes in packed form."""
        lengths = {request.length for request in self.requests}
        if len(lengths) != 1:
            raise UnsupportedModelError(f"the sequences hold {sorted(lengths)} tokens; give position_ids, in packed form")
        return lengths.pop()

    def get_max_length(self, layer_idx: int | None = None) -> int:  # noqa: ARG002
        return -1

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return len(self.requests)

    def __len__(self) -> int:
        return len(self.attached.family.layers)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        raise UnsupportedModelError("a paged cache cannot be cropped, reordered, reset or split: open other requests instead")

    crop = reorder_cache = reset = batch_repeat_interleave = batch_select_indices = offload = prefetch = _refuse
