"""Finds and loads the compiled op library, once, when this module is imported.

The library registers ``torch.ops.hetkv`` and holds no Python, so it is loaded and not imported. In an editable install it lies
in another folder than the Python sources; the import system knows both.
"""

import importlib.util
from collections.abc import Callable

import torch


def ops_path() -> str:
    """Path of the compiled op library. ``ImportError`` if it was not built or not installed."""
    spec = importlib.util.find_spec("hetkv._ops")
    if spec is None or spec.origin is None:
        raise ImportError("hetkv._ops is not there: build hetkv with `pip install --no-build-isolation .`")
    return spec.origin


_load: Callable[[str], None] = torch.ops.load_library
_load(ops_path())
