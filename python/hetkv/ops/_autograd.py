"""Autograd kernels: an op that copies bytes has no derivative, so a tensor that wants one is refused instead of losing it.

Torch's default for an op without an autograd kernel is to run it and warn at the backward pass, if there is one. These kernels
cost some microseconds a call outside ``torch.inference_mode``, and nothing inside it or in a compiled graph.
"""

from collections.abc import Callable
from typing import Any

import torch

from . import _library  # noqa: F401  # the schemas must be there first

_open_library: Callable[..., Any] = torch.library.Library
_AUTOGRAD = _open_library("hetkv", "IMPL")  # registrations live as long as this object


def _is_tensor(kind: Any) -> bool:
    if isinstance(kind, torch.OptionalType):
        kind = kind.getElementType()
    return isinstance(kind, torch.TensorType)


def refuse_gradients(name: str) -> None:
    """Registers the autograd kernel of one op."""
    op = getattr(torch.ops.hetkv, name).default
    tensors = [(i, a.name) for i, a in enumerate(op._schema.arguments) if _is_tensor(a.type)]

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            for position, argument in tensors:
                value = args[position] if position < len(args) else kwargs.get(argument)
                if value is not None and value.requires_grad:
                    raise ValueError(f"{name}: {argument}.requires_grad = True: expected False, the op has no derivative")
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    _AUTOGRAD.impl(name, kernel, "Autograd", with_keyset=True)
