"""DeepSeek-V4 on blocks: the forward of every attention module is replaced, on the instance.

The attention interface of transformers comes too late here: compressor and indexer run before it, on the cache's own layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .... import ops
from ..state import UnsupportedModelError
from .family import AttachedFamily
from .paged_cache import PagedCache
from .sections import Ring, Section, ring_of, section_of

if TYPE_CHECKING:
    from .... import Cache

_CSA = "compressed_sparse_attention"
_HCA = "heavily_compressed_attention"


@dataclass(frozen=True)
class _Compressor:
    """A compressor or an indexer's compressor: where its raw rows and its entries go."""

    ratio: int
    overlap: bool
    ring: Ring
    entries: Section


@dataclass(frozen=True)
class _Layer:
    window: Section
    main: _Compressor | None = None
    index: _Compressor | None = None


class AttachedDeepseekV4(AttachedFamily):
    """All attention modules of one `DeepseekV4ForCausalLM`."""

    def __init__(self, model: nn.Module, cache: Cache) -> None:
        config: Any = model.config
        types: list[str] = list(config.layer_types)
        self.layers = tuple(range(len(types)))
        self._modules: list[Any] = [model.model.layers[i].self_attn for i in self.layers]  # type: ignore[union-attr,index]
        self._plans = [self._plan(cache, layer, kind, config) for layer, kind in enumerate(types)]

    @staticmethod
    def _plan(cache: Cache, layer: int, kind: str, config: Any) -> _Layer:
        layout = cache.layout
        window = section_of(layout, "swa", "kv", layer)
        if kind == _CSA:
            ratio = int(config.compress_rates[_CSA])
            return _Layer(
                window,
                _Compressor(ratio, True, ring_of(layout, "csa_tail", layer), section_of(layout, "csa_kv", "kv", layer)),
                _Compressor(ratio, True, ring_of(layout, "csa_index_tail", layer), section_of(layout, "csa_index", "key", layer)),
            )
        if kind == _HCA:
            ratio = int(config.compress_rates[_HCA])
            entries = section_of(layout, "hca_kv", "kv", layer)
            return _Layer(window, _Compressor(ratio, False, ring_of(layout, "hca_tail", layer), entries))
        return _Layer(window)

    def install(self) -> None:
        for module, plan in zip(self._modules, self._plans, strict=True):
            module.forward = MethodType(_forward_on_blocks(plan, type(module).forward), module)

    def remove(self) -> None:
        for module in self._modules:
            module.__dict__.pop("forward", None)

    def ring_biases(self) -> dict[str, Tensor]:
        csa = [m for m, plan in zip(self._modules, self._plans, strict=True) if plan.index is not None]
        if not csa:
            return {}
        main = torch.stack([m.compressor.position_bias.detach().float() for m in csa])
        index = torch.stack([m.compressor.indexer.position_bias.detach().float() for m in csa])
        return {"csa_tail": main, "csa_index_tail": index}


def _forward_on_blocks(plan: _Layer, stock: Callable[..., Any]) -> Callable[..., tuple[Tensor, None]]:
    """The replacement for `DeepseekV4Attention.forward` of one layer: same arguments, same result."""

    def forward(  # noqa: PLR0917  # the stock signature
        self: Any,
        hidden_states: Tensor,
        position_embeddings: dict[str, tuple[Tensor, Tensor]],
        position_ids: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG001  # lengths and windows come from the step
        cache: PagedCache | None = None,
        **kwargs: Any,  # noqa: ARG001
    ) -> tuple[Tensor, None]:
        if not isinstance(cache, PagedCache):
            raise UnsupportedModelError("the model is attached: pass a PagedCache as cache=, or call detach first")
        cache.check_ready()
        shape = hidden_states.shape[:-1]
        tokens = shape.numel()
        cos, sin = position_embeddings[self.rope_layer_type]
        cos_rows = cos.expand(*shape, -1).reshape(tokens, -1).float()
        sin_rows = sin.expand(*shape, -1).reshape(tokens, -1).float()

        latent = self.q_a_norm(self.q_a_proj(hidden_states))
        query = self.q_b_norm(self.q_b_proj(latent).view(*shape, -1, self.head_dim))
        query = apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2).reshape(tokens, -1, self.head_dim)

        ops.write_rows(
            cache.arena,
            self.kv_proj(hidden_states).reshape(tokens, self.head_dim),
            cache.slots["swa"],
            rows_per_block=plan.window.rows_per_block,
            section_offset=plan.window.offset,
            entry_format=plan.window.format,
            norm_weight=self.kv_norm.weight,
            norm_eps=self.kv_norm.variance_epsilon,
            cos=cos_rows,
            sin=sin_rows,
        )
        entry_table, selected = None, None
        if plan.main is not None:
            _compress(self.compressor, plan.main, cache, hidden_states, position_ids)
            entry_table = cache.block_tables[plan.main.entries.group]
            if plan.index is not None:
                selected = _select(
                    self.compressor.indexer,
                    plan.index,
                    cache,
                    hidden_states=hidden_states,
                    latent=latent,
                    position_ids=position_ids,
                )
        entries = plan.main.entries if plan.main is not None else plan.window
        out, _ = ops.sparse_attention(
            query,
            cache.arena,
            cache.block_tables["swa"],
            entry_table,
            selected,
            cache.cu_seqlens_q,
            cache.seqused_k,
            window=self.sliding_window,
            window_rows_per_block=plan.window.rows_per_block,
            window_offset=plan.window.offset,
            window_format=plan.window.format,
            ratio=plan.main.ratio if plan.main is not None else 1,
            entry_rows_per_block=entries.rows_per_block,
            entry_offset=entries.offset,
            entry_format=entries.format,
            scale=self.scaling,
            sinks=self.sinks,
            cos=cos_rows,
            sin=sin_rows,
        )
        grouped = self.o_a_proj(out.view(*shape, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(grouped), None

    forward.__doc__ = stock.__doc__
    return forward


def _entry_rotation(module: Any, hidden_states: Tensor, position_ids: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """Per token, the rotation of the entry that it closes: of the first position of its window, float32 [tokens, rope / 2]."""
    first = (position_ids + 1 - ratio).clamp_min(0)
    cos, sin = module.rotary_emb(hidden_states, position_ids=first, layer_type=module.rope_layer_type)
    tokens = hidden_states.shape[0] * hidden_states.shape[1]
    shape = (*hidden_states.shape[:-1], -1)
    return cos.expand(shape).reshape(tokens, -1).float(), sin.expand(shape).reshape(tokens, -1).float()


def _compress(module: Any, plan: _Compressor, cache: PagedCache, hidden_states: Tensor, position_ids: Tensor) -> None:
    kv, gate = module.kv_proj(hidden_states).flatten(0, 1), module.gate_proj(hidden_states).flatten(0, 1)
    cos, sin = _entry_rotation(module, hidden_states, position_ids, plan.ratio)
    ops.compress(
        cache.arena,
        kv,
        gate,
        module.position_bias,
        module.kv_norm.weight,
        cos,
        sin,
        cache.cu_seqlens_q,
        cache.seqused_k,
        cache.block_tables[plan.ring.group],
        cache.slots[plan.entries.group],
        ratio=plan.ratio,
        overlap=plan.overlap,
        ring_rows=plan.ring.rows,
        ring_kv_offset=plan.ring.kv_offset,
        ring_gate_offset=plan.ring.gate_offset,
        rows_per_block=plan.entries.rows_per_block,
        section_offset=plan.entries.offset,
        entry_format=plan.entries.format,
        norm_eps=module.kv_norm.variance_epsilon,
    )


def _select(
    indexer: Any, plan: _Compressor, cache: PagedCache, *, hidden_states: Tensor, latent: Tensor, position_ids: Tensor
) -> Tensor:
    """The entries that every token reads: int32 [tokens, index_topk], -1 where it reads fewer."""
    _compress(indexer, plan, cache, hidden_states, position_ids)
    shape = hidden_states.shape[:-1]
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(latent).view(*shape, -1, indexer.head_dim)
    query = apply_rotary_pos_emb(query, cos, sin, unsqueeze_dim=2).flatten(0, 1)
    scorer = indexer.scorer
    weights = scorer.weights_proj(hidden_states).float() * (scorer.weights_scaling * scorer.softmax_scale)
    selected: Tensor = ops.select_entries(
        query,
        weights.flatten(0, 1),
        cache.arena,
        cache.block_tables[plan.entries.group],
        cache.cu_seqlens_q,
        cache.seqused_k,
        ratio=plan.ratio,
        rows_per_block=plan.entries.rows_per_block,
        section_offset=plan.entries.offset,
        entry_format=plan.entries.format,
        k=indexer.index_topk,
    )
    return selected
