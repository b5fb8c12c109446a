"""What the fake kernels of all families share: ``torch.compile`` and meta tensors see a fake instead of the real op.

A fake makes the outputs, and checks, in the same order as the real op, what can be checked without memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _library  # noqa: F401  # the schemas must be there first

check_symbolic: Callable[..., None] = torch._check  # sizes may be symbols: this also teaches the tracer
register_fake: Callable[..., Any] = torch.library.register_fake


def check(condition: bool, op: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{op}: {message}")


def check_arena(op: str, arena: Tensor) -> None:
    check(arena.ndim == 1, op, f"arena.ndim = {arena.ndim}: expected 1")
    check(arena.dtype == torch.uint8, op, f"arena.dtype = {arena.dtype}: expected torch.uint8")


def check_beside(arena: Tensor, op: str, *, dtype: torch.dtype | None = None, ndim: int, **tensors: Tensor | None) -> None:
    """Tensor arguments, by name (None: left out), that must lie where the arena lies."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        check(tensor.ndim == ndim, op, f"{name}.ndim = {tensor.ndim}: expected {ndim}")
        check(tensor.device == arena.device, op, f"{name}.device = {tensor.device}: expected {arena.device}, where arena is")
        if dtype is not None:
            check(tensor.dtype == dtype, op, f"{name}.dtype = {tensor.dtype}: expected {dtype}")
