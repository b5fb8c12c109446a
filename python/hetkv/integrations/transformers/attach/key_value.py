"""gpt-oss and Gemma 3 on blocks: `cache.update` writes rows, and an attention function without a mask reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface

from .... import ops
from ..state import UnsupportedModelError
from .family import AttachedFamily
from .paged_cache import PagedCache
from .sections import Section, section_of

if TYPE_CHECKING:
    from .... import Cache

ATTENTION_NAME = "hetkv"
"""Name of the attention function in transformers. It has no mask function, so transformers makes no mask for it."""


@dataclass(frozen=True)
class _Layer:
    key: Section
    value: Section
    window: int  # 0: full


class AttachedKeyValue(AttachedFamily):
    """Layers that hold plain keys and values, in groups `full` and `swa`."""

    def __init__(self, model: nn.Module, cache: Cache) -> None:
        config: Any = model.config.get_text_config(decoder=True)  # type: ignore[operator,union-attr]
        attention: list[Any] = [
            module for module in model.modules() if hasattr(module, "k_proj") and hasattr(module, "layer_idx")
        ]
        self._modules: dict[int, Any] = {int(module.layer_idx): module for module in attention}
        self.layers = tuple(sorted(self._modules))
        self._plans = {layer: self._plan(cache, layer, config) for layer in self.layers}

    @staticmethod
    def _plan(cache: Cache, layer: int, config: Any) -> _Layer:
        sliding = config.layer_types[layer] == "sliding_attention"
        group = "swa" if sliding else "full"
        key, value = (section_of(cache.layout, group, name, layer) for name in ("k", "v"))
        return _Layer(key, value, int(config.sliding_window) if sliding else 0)

    def install(self) -> None:
        AttentionInterface.register(ATTENTION_NAME, _attention_on_blocks)
        for module in self._modules.values():
            module.hetkv_family = self

    def remove(self) -> None:
        for module in self._modules.values():
            del module.hetkv_family

    def write_key_value(self, step: PagedCache, layer: int, key: Tensor, value: Tensor) -> None:
        plan = self._plans[layer]
        ops.write_key_value(
            step.arena,
            key.transpose(1, 2).flatten(0, 1),
            value.transpose(1, 2).flatten(0, 1),
            step.slots[plan.key.group],
            rows_per_block=plan.key.rows_per_block,
            key_offset=plan.key.offset,
            value_offset=plan.value.offset,
            entry_format=plan.key.format,
        )

    def attend(self, step: PagedCache, module: Any, query: Tensor, *, heads: int, scale: float, sinks: Tensor | None) -> Tensor:
        """query [batch, heads, tokens, head dim] -> [batch, tokens, heads, head dim]. heads: of keys and values."""
        plan = self._plans[module.layer_idx]
        batch, _, tokens, _ = query.shape
        out: Tensor = ops.paged_attention(
            query.transpose(1, 2).flatten(0, 1).contiguous(),
            step.arena,
            step.block_tables[plan.key.group],
            step.cu_seqlens_q,
            step.seqused_k,
            num_kv_heads=heads,
            rows_per_block=plan.key.rows_per_block,
            key_offset=plan.key.offset,
            value_offset=plan.value.offset,
            entry_format=plan.key.format,
            scale=scale,
            window=plan.window,
            sinks=sinks,
            softcap=getattr(module, "attn_logit_softcapping", None) or 0.0,
        )[0]
        return out.view(batch, tokens, *out.shape[1:])


def _attention_on_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001  # already in the blocks
    attention_mask: Tensor | None,  # noqa: ARG001  # lengths and windows come from the step
    *,
    scaling: float,
    s_aux: Tensor | None = None,
    **kwargs: Any,  # noqa: ARG001
) -> tuple[Tensor, None]:
    """Attention function of transformers: key and value only tell the number of heads."""
    family: AttachedKeyValue | None = getattr(module, "hetkv_family", None)
    step = None if family is None else family.active
    if family is None or step is None:
        raise UnsupportedModelError("the model is attached: pass a PagedCache as cache=, or call detach first")
    family.active = None
    return family.attend(step, module, query, heads=key.shape[1], scale=scaling, sinks=s_aux), None
