"""Reading a model's config, object or dict, without ever inventing a value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

from .. import _core

_MISSING = object()


class ModelConfig:
    """A transformers config object or a `config.json` as a mapping. Every refusal is a LayoutError that names the field."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def refuse(self, field: str, why: str) -> NoReturn:
        """Raises LayoutError about `field` of this config."""
        _core.refuse_layout("", f"config.{field}", why)

    def get(self, name: str) -> Any:
        """The value of a field, None if it is absent or null."""
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        value = getattr(self._source, name, _MISSING)
        return None if value is _MISSING else value

    def integer(self, name: str) -> int:
        """A positive integer field. LayoutError if it is absent or anything else."""
        return self.checked_integer(name, self.get(name))

    def checked_integer(self, name: str, value: Any) -> int:
        """`value`, found under `name`, as a positive integer."""
        if value is None:
            self.refuse(name, "is missing; a dict must carry it, a transformers config object has the model's default")
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            self.refuse(name, f"{value!r} is not a positive integer")
        return value

    def text(self) -> ModelConfig:
        """The config of the language model: this one, or its `text_config`."""
        inner = self.get("text_config")
        return self if inner is None else ModelConfig(inner)

    def model_type(self) -> str:
        name = self.get("model_type")
        if not isinstance(name, str) or not name:
            self.refuse("model_type", "is missing, so the model is unknown")
        return name

    def refuse_overrides(self) -> None:
        """LayoutError if single layers override the config: their shapes would not fit one group."""
        overridden = self.get("is_heterogeneous")
        if overridden is None:
            overridden = self.get("per_layer_config")
        if overridden:
            self.refuse("per_layer_config", "layers with overrides of their own are not supported")

    def layer_types(self, allowed: Collection[str], derived: Iterable[str] | None = None) -> list[str]:
        """The type of every layer: the field `layer_types`, else `derived`, which comes from another field of the checkpoint.

        LayoutError if neither is there, if the count is not `num_hidden_layers`, or if a type is not in `allowed`.
        """
        types = self.get("layer_types")
        if types is None:
            types = derived
        if types is None:
            self.refuse("layer_types", "is missing, and no other field maps the layers; the map must come from the checkpoint")
        types = list(types)
        layers = self.integer("num_hidden_layers")
        if len(types) != layers:
            self.refuse("layer_types", f"maps {len(types)} layers, num_hidden_layers is {layers}")
        for layer, kind in enumerate(types):
            if kind not in allowed:
                self.refuse("layer_types", f"layer {layer} is {kind!r}; known are {', '.join(sorted(allowed))}")
        return types


def layers_of(types: list[str], kind: str) -> list[int]:
    """Indices of the layers of that type, ascending."""
    return [layer for layer, each in enumerate(types) if each == kind]


def at_least_float32(dtype: _core.DType) -> _core.DType:
    """The dtype of `dtype` and float32 combined: what torch computes when a float32 parameter meets a row."""
    return dtype if dtype is _core.DType.float64 else _core.DType.float32
