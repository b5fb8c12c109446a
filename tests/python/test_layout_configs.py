"""Layouts from configs, checked against the state that real transformers models leave in a `DynamicCache`.

Every model is tiny, random and built on the CPU. After 37 tokens each group must account for exactly the rows that the cache
holds: which layers, how many rows, their shape and their dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetkv
from hetkv.layout import layout_from_config, supported_model_types

transformers = pytest.importorskip("transformers")
from tiny_models import CONFIGS, KIMI_LAYERS  # noqa: E402  (needs transformers)

TOKENS = 37
VOCABULARY = 64
V4_TYPES = [
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "compressed_sparse_attention",
]


# Windows and ratios that 37 tokens cross, and sizes that all differ, so that none can stand for another.
_SMALL: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "sliding_window": 8,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    },
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {"sliding_window": 8},
    "qwen3_next": {"linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
}


def tiny(model_type: str, **changes: Any) -> Any:
    return CONFIGS[model_type](VOCABULARY, **_SMALL.get(model_type, {}) | changes)


def build_model(config: Any, dtype: torch.dtype) -> nn.Module:
    """A random model whose parameters have the dtypes that `from_pretrained(dtype=...)` gives them."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or []
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in strict):
            parameter.data = parameter.data.float()
    model.set_attn_implementation("eager")
    return model


# ---- what the cache holds, as {group: {layer: {field: rows [n, *shape]}}} ----------------------------------------------------

State = dict[str, dict[int, dict[str, Tensor]]]


def attention_rows(layer: Any, key: str, value: str) -> dict[str, Tensor]:
    """Rows [n, heads, dim] of a plain layer's K and V."""
    return {key: layer.keys[0].transpose(0, 1), value: layer.values[0].transpose(0, 1)}


def latent_rows(layer: Any) -> dict[str, Tensor]:
    assert layer.keys.shape[1] == layer.values.shape[1] == 1
    return {"keys": layer.keys[0, 0], "values": layer.values[0, 0]}


def recurrent_rows(layer: Any) -> dict[str, Tensor]:
    assert layer.number_of_states == 1
    return {"conv": layer.conv_states[0], "recurrent": layer.recurrent_states[0]}


def v4_state(cache: Any, config: Any) -> State:
    state: State = {}
    for index, (layer, kind) in enumerate(zip(cache.layers, config.layer_types, strict=True)):
        assert layer.keys.shape[1] == 1
        assert torch.equal(layer.keys, layer.values)  # one field serves both
        state.setdefault("swa", {})[index] = {"kv": layer.keys[0, 0]}
        if kind == "sliding_attention":
            continue
        prefix = "csa" if kind == "compressed_sparse_attention" else "hca"
        slots = [("compressor", f"{prefix}_kv", f"{prefix}_tail", "kv")]
        if prefix == "csa":
            slots.append(("indexer", "csa_index", "csa_index_tail", "key"))
        for slot, entries, tail, field in slots:
            state.setdefault(entries, {})[index] = {field: layer.compressed_kv[slot][0]}
            rows = {"kv": layer.buffer_kv[slot][0], "gate": layer.buffer_gate[slot][0]}
            if prefix == "csa":
                rows |= {"overlap_kv": layer.overlap_kv[slot][0], "overlap_gate": layer.overlap_gate[slot][0]}
            state.setdefault(tail, {})[index] = rows
    return state


def v32_state(cache: Any, config: Any) -> State:
    layers = dict(enumerate(cache.layers))
    return {
        "latent": {i: latent_rows(layer) for i, layer in layers.items()},
        "index": {i: {"key": layer.indexer_keys[0]} for i, layer in layers.items()},
    }


def layered_state(cache: Any, config: Any) -> State:
    """gpt-oss, Gemma 3, Qwen3-Next, Kimi Linear: what each layer holds follows from its type alone."""
    latent = config.model_type == "kimi_linear"
    linear = "kda" if latent else "gdn"
    state: State = {}
    for index, (layer, kind) in enumerate(zip(cache.layers, config.layer_types, strict=True)):
        if kind == "linear_attention":
            state.setdefault(linear, {})[index] = recurrent_rows(layer)
        elif kind == "sliding_attention":
            state.setdefault("swa", {})[index] = attention_rows(layer, "k", "v")
        elif latent:
            state.setdefault("latent", {})[index] = latent_rows(layer)
        else:
            state.setdefault("full", {})[index] = attention_rows(layer, "k", "v")
    return state


STATES: dict[str, Callable[[Any, Any], State]] = {"deepseek_v32": v32_state, "deepseek_v4": v4_state}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_groups_hold_what_the_cache_holds(model_type: str, dtype: torch.dtype) -> None:
    config = tiny(model_type)
    model = build_model(config, dtype)
    cache = transformers.DynamicCache(config=config)
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(tokens, cache=cache, use_cache=True)

    layout = layout_from_config(config, block_size=16, dtype=dtype)
    state = STATES.get(model_type, layered_state)(cache, config)
    assert layout.model == model_type
    assert {group.name for group in layout.groups} == set(state)
    for group in layout.groups:
        assert list(group.layers) == sorted(state[group.name])
        need = layout.need(group.name, TOKENS)
        for rows in state[group.name].values():
            assert [field.name for field in group.fields] == list(rows)
            for field in group.fields:
                tensor = rows[field.name]
                count = 1 if need.snapshot else need.overlap_rows if field.overlap else need.end - need.begin
                assert tuple(tensor.shape) == (count, *field.shape), (group.name, field.name)
                assert str(tensor.dtype) == f"torch.{field.dtype.name}", (group.name, field.name)
                assert field.row_bytes == tensor[0].numel() * tensor.element_size()


def test_every_family_is_tested() -> None:
    assert supported_model_types() == tuple(sorted(CONFIGS))


def test_groups_of_deepseek_v4() -> None:
    layout = layout_from_config(tiny("deepseek_v4", sliding_window=128, compress_rates=None), block_size=64)
    assert [group.name for group in layout.groups] == [
        "csa_kv",
        "csa_index",
        "hca_kv",
        "swa",
        "csa_tail",
        "csa_index_tail",
        "hca_tail",
    ]
    assert [group.compress_ratio for group in layout.groups] == [4, 4, 128, 1, 4, 4, 128]
    assert layout.history_groups == ("csa_kv", "csa_index", "hca_kv")
    assert layout.point_groups == ("swa", "csa_tail", "csa_index_tail", "hca_tail")
    assert layout.group("csa_index").spec.indexes == "csa_kv"
    assert layout.group("swa").layers == (0, 1, 2, 3)
    assert layout.group("csa_tail").layers == (1, 3)
    assert layout.group("hca_tail").layers == (2,)
    assert layout.group("swa").spec.window == 128
    assert layout.group("csa_tail").spec.overlap_rows == 4


def test_groups_without_layers_are_left_out() -> None:
    sliding = layout_from_config(tiny("deepseek_v4", layer_types=["sliding_attention"] * 4))
    assert [group.name for group in sliding.groups] == ["swa"]
    hca = layout_from_config(tiny("deepseek_v4", layer_types=["heavily_compressed_attention"] * 4))
    assert [group.name for group in hca.groups] == ["hca_kv", "swa", "hca_tail"]
    config = tiny("gemma3_text")
    config.layer_types = ["full_attention"] * 4
    assert [group.name for group in layout_from_config(config).groups] == ["full"]


# ---- dicts -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_a_saved_config_gives_the_same_layout(model_type: str) -> None:
    config = tiny(model_type)
    from_object = layout_from_config(config, block_size=16)
    assert layout_from_config(config.to_dict(), block_size=16).fingerprint == from_object.fingerprint


def test_deepseek_v4_layer_map_from_compress_ratios() -> None:
    checkpoint = {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 4,
        "compress_ratios": [0, 4, 128, 4, 0],  # the fifth is an MTP layer
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
    }
    layout = layout_from_config(checkpoint, dtype="bfloat16")
    config = tiny("deepseek_v4", head_dim=512, index_head_dim=128, sliding_window=128, compress_rates=None)
    assert layout.fingerprint == layout_from_config(config, dtype="bfloat16").fingerprint
    folded = transformers.DeepseekV4Config(**checkpoint)
    assert layout.fingerprint == layout_from_config(folded, dtype="bfloat16").fingerprint
    overlap_gate = layout.group("csa_tail").field("overlap_gate")
    assert overlap_gate.dtype.name == "float32"
    assert layout.group("csa_tail").field("gate").dtype.name == "bfloat16"


def test_gemma3_multimodal_config_is_read_at_its_text_config() -> None:
    text = tiny("gemma3_text")
    inner = text.to_dict()
    expected = layout_from_config(text).fingerprint
    assert layout_from_config({"model_type": "gemma3", "text_config": inner}).fingerprint == expected
    outer = transformers.Gemma3Config(text_config=text)
    assert layout_from_config(outer).fingerprint == expected
    assert layout_from_config(outer).model == "gemma3_text"


def test_older_layer_patterns() -> None:
    gemma = tiny("gemma3_text").to_dict() | {"num_hidden_layers": 7, "sliding_window_pattern": 3}
    del gemma["layer_types"]
    assert layout_from_config(gemma).group("full").layers == (2, 5)
    qwen = tiny("qwen3_next").to_dict() | {"num_hidden_layers": 6, "full_attention_interval": 3}
    del qwen["layer_types"]
    assert layout_from_config(qwen).group("full").layers == (2, 5)
    kimi = tiny("kimi_linear").to_dict()
    del kimi["layer_types"]
    assert layout_from_config(kimi).group("latent").layers == (2,)


def v4_dict(**changes: Any) -> dict[str, Any]:
    settings = tiny("deepseek_v4").to_dict() | changes
    return {name: value for name, value in settings.items() if value is not ...}


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown model": (lambda: {"model_type": "llama"}, "config.model_type"),
    "no model type": (dict, "config.model_type"),
    "no layer map": (lambda: v4_dict(layer_types=...), "config.layer_types"),
    "short layer map": (lambda: v4_dict(layer_types=V4_TYPES[:3]), "config.layer_types"),
    "long layer map": (lambda: v4_dict(layer_types=[*V4_TYPES, "sliding_attention"]), "config.layer_types"),
    "short ratios": (lambda: v4_dict(layer_types=..., compress_ratios=[0, 4, 128]), "config.layer_types"),
    "unknown layer type": (lambda: v4_dict(layer_types=[*V4_TYPES[:3], "full_attention"]), "config.layer_types"),
    "unknown ratio": (lambda: v4_dict(layer_types=..., compress_ratios=[0, 4, 128, 8]), "config.compress_ratios"),
    "two layer maps": (lambda: v4_dict(compress_ratios=[0, 4, 4, 128]), "config.layer_types"),
    "no rates": (lambda: v4_dict(compress_rates=...), "config.compress_rates"),
    "one rate missing": (
        lambda: v4_dict(compress_rates={"compressed_sparse_attention": 4}),
        "config.compress_rates['heavily_compressed_attention']",
    ),
    "no head_dim": (lambda: v4_dict(head_dim=...), "config.head_dim"),
    "head_dim zero": (lambda: v4_dict(head_dim=0), "config.head_dim"),
    "head_dim text": (lambda: v4_dict(head_dim="16"), "config.head_dim"),
    "head_dim true": (lambda: v4_dict(head_dim=True), "config.head_dim"),
    "no window": (lambda: v4_dict(sliding_window=None), "config.sliding_window"),
    "overrides of a layer": (lambda: v4_dict(per_layer_config={"0": {"head_dim": 8}}), "config.per_layer_config"),
    "bidirectional": (
        lambda: tiny("gemma3_text").to_dict() | {"use_bidirectional_attention": True},
        "config.use_bidirectional_attention",
    ),
    "layer in both lists": (
        lambda: (
            tiny("kimi_linear").to_dict()
            | {"layer_types": None, "linear_attn_config": KIMI_LAYERS | {"kda_layers": [1, 2, 3, 4]}}
        ),
        "config.linear_attn_config",
    ),
    "layer in no list": (
        lambda: tiny("kimi_linear").to_dict() | {"layer_types": None, "linear_attn_config": KIMI_LAYERS | {"kda_layers": [1, 2]}},
        "config.linear_attn_config",
    ),
    "nested size wrong": (
        lambda: tiny("kimi_linear").to_dict() | {"linear_attn_config": KIMI_LAYERS | {"num_heads": -1}},
        "config.linear_attn_config['num_heads']",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_refusals_name_the_field(case: str) -> None:
    make, field = REFUSALS[case]
    config = make()
    with pytest.raises(hetkv.LayoutError) as caught:
        layout_from_config(config, block_size=16)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_an_object_with_overrides_is_refused() -> None:
    config = tiny("gpt_oss", per_layer_config={0: {"sliding_window": 4}})
    assert config.is_heterogeneous
    with pytest.raises(hetkv.LayoutError, match="per_layer_config"):
        layout_from_config(config, block_size=16)


def test_ratios_must_fit_the_block_size() -> None:
    config = tiny("deepseek_v4", compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 24})
    with pytest.raises(hetkv.LayoutError, match=r"hca_kv.*24"):
        layout_from_config(config, block_size=16)


def test_unknown_dtype() -> None:
    with pytest.raises(hetkv.ArgumentError, match="float33"):
        layout_from_config(tiny("gpt_oss"), dtype="float33")
