"""DeepSeek-V4: sliding windows on all layers; compressed entries with an index (CSA) or without (HCA) on most."""

from __future__ import annotations

from collections.abc import Mapping

from .._core import DType, FieldSpec, GroupSpec, ObjectKind, Retention
from .model_config import ModelConfig, at_least_float32, layers_of

_SLIDING = "sliding_attention"
_CSA = "compressed_sparse_attention"
_HCA = "heavily_compressed_attention"
# What the numbers of a checkpoint's `compress_ratios` mean.
_TYPE_OF_RATIO = {0: _SLIDING, 4: _CSA, 128: _HCA}
_RATIO_OF_TYPE = {kind: ratio for ratio, kind in _TYPE_OF_RATIO.items()}
_OLD_RATE_FIELD = {_CSA: "compress_rate_csa", _HCA: "compress_rate_hca"}


def deepseek_v4_groups(config: ModelConfig, dtype: DType) -> list[GroupSpec]:
    """Groups of a `DeepseekV4ForCausalLM` cache; c = `head_dim`, c_I = `index_head_dim`, m = the layer type's ratio.

    `csa_kv` [c], `csa_index` [c_I] and `hca_kv` [c] hold one entry per m tokens; `swa` [c] one row per token, K and V being
    the same tensor; `csa_tail` and `csa_index_tail` the raw rows of the open window (two series: kv and gate [2 c]) and the
    first series of the last closed one (m rows of [c]); `hca_tail` the raw rows of the open window (kv and gate [c]).
    Groups without layers are left out.
    """
    types = config.layer_types(_RATIO_OF_TYPE, _types_from_ratios(config))
    width = config.integer("head_dim")
    csa, hca = layers_of(types, _CSA), layers_of(types, _HCA)
    groups: list[GroupSpec] = []
    if csa:
        ratio = _ratio(config, _CSA)
        index_width = config.integer("index_head_dim")
        groups.append(_entries("csa_kv", ObjectKind.compressed_kv, csa, ratio, FieldSpec("kv", dtype, [width])))
        key = FieldSpec("key", dtype, [index_width])
        groups.append(_entries("csa_index", ObjectKind.indexer_state, csa, ratio, key, indexes="csa_kv"))
    if hca:
        groups.append(_entries("hca_kv", ObjectKind.compressed_kv, hca, _ratio(config, _HCA), FieldSpec("kv", dtype, [width])))
    groups.append(
        GroupSpec(
            "swa",
            ObjectKind.swa_window,
            Retention.window,
            owner_layers=list(range(len(types))),
            window=config.integer("sliding_window"),
            fields=[FieldSpec("kv", dtype, [width])],
        )
    )
    if csa:
        groups.append(_overlapping_tail("csa_tail", csa, ratio, width, dtype))
        groups.append(_overlapping_tail("csa_index_tail", csa, ratio, index_width, dtype))
    if hca:
        groups.append(
            GroupSpec(
                "hca_tail",
                ObjectKind.uncompressed_tail,
                Retention.tail,
                owner_layers=hca,
                compress_ratio=_ratio(config, _HCA),
                fields=[FieldSpec("kv", dtype, [width]), FieldSpec("gate", dtype, [width])],
            )
        )
    return groups


def _entries(name: str, kind: ObjectKind, layers: list[int], ratio: int, field: FieldSpec, *, indexes: str = "") -> GroupSpec:
    return GroupSpec(name, kind, Retention.history, owner_layers=layers, compress_ratio=ratio, fields=[field], indexes=indexes)


def _overlapping_tail(name: str, layers: list[int], ratio: int, width: int, dtype: DType) -> GroupSpec:
    return GroupSpec(
        name,
        ObjectKind.uncompressed_tail,
        Retention.tail,
        owner_layers=layers,
        compress_ratio=ratio,
        overlap_rows=ratio,
        fields=[
            FieldSpec("kv", dtype, [2 * width]),
            FieldSpec("gate", dtype, [2 * width]),
            FieldSpec("overlap_kv", dtype, [width], overlap=True),
            # This one is kept with its bias added, and the bias is float32 whatever the model's dtype.
            FieldSpec("overlap_gate", at_least_float32(dtype), [width], overlap=True),
        ],
    )


def _types_from_ratios(config: ModelConfig) -> list[str] | None:
    """Layer types from `compress_ratios`. Entries past `num_hidden_layers` belong to MTP layers, which have no cache here."""
    ratios = config.get("compress_ratios")
    if ratios is None:
        return None
    types = []
    for layer, ratio in enumerate(list(ratios)[: config.integer("num_hidden_layers")]):
        if ratio not in _TYPE_OF_RATIO:
            config.refuse("compress_ratios", f"layer {layer} has ratio {ratio!r}; known are 0, 4 and 128")
        types.append(_TYPE_OF_RATIO[ratio])
    declared = config.get("layer_types")
    if declared is not None and list(declared) != types:
        config.refuse("layer_types", "contradicts compress_ratios")
    return types


def _ratio(config: ModelConfig, kind: str) -> int:
    """Tokens per entry of a layer type: its old scalar field, else `compress_rates`, else the number in `compress_ratios`."""
    old = _OLD_RATE_FIELD[kind]
    if config.get(old) is not None:
        return config.integer(old)
    rates = config.get("compress_rates")
    if isinstance(rates, Mapping):
        return config.checked_integer(f"compress_rates[{kind!r}]", rates.get(kind))
    if config.get("compress_ratios") is None:
        config.refuse("compress_rates", f"is missing, so the ratio of {kind} layers is unknown")
    return _RATIO_OF_TYPE[kind]
