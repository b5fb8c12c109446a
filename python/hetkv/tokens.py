"""Token ids in the forms that callers have them, as one contiguous int32 array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TokenIds", "TokenInput", "as_token_ids"]

TokenIds: TypeAlias = npt.NDArray[np.int32]
TokenInput: TypeAlias = "npt.NDArray[Any] | Tensor | Sequence[int]"

_LARGEST = 2**31 - 1


def as_token_ids(tokens: TokenInput, argument: str = "tokens", *, may_be_empty: bool = False) -> TokenIds:
    """The ids as int32[n], C-contiguous.

    int32 numpy arrays and int32 CPU torch tensors are viewed, not copied: do not change them while a call that took them runs.
    Other integer arrays and tensors, lists and tuples are converted, every id checked to be in 0 ... 2**31 - 1. (The core checks
    the sign of int32 ids.) ArgumentError, which is a ValueError, names the argument: no or several dimensions, none at all,
    floats or bools, ids out of range, arrays that are not contiguous, tensors on a device.
    """
    ids = _as_array(tokens, argument)
    if ids.ndim != 1:
        raise ArgumentError(argument, f"{ids.ndim} dimensions", "one dimension: the ids of one sequence")
    if ids.size == 0 and not may_be_empty:
        raise ArgumentError(argument, "no tokens", "at least one token id")
    if not ids.flags.c_contiguous:
        raise ArgumentError(argument, "a strided array", "a contiguous one")
    if ids.dtype == np.int32:
        return ids
    if ids.dtype.kind not in "iu":
        raise ArgumentError(argument, f"dtype {ids.dtype}", "integers (int32 is taken without copying)")
    if ids.size > 0:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > _LARGEST:
            raise ArgumentError(argument, str(low if low < 0 else high), f"token ids, 0 to {_LARGEST}")
    return ids.astype(np.int32)


def _as_array(tokens: TokenInput, argument: str) -> npt.NDArray[Any]:
    if isinstance(tokens, np.ndarray):
        return tokens
    if isinstance(tokens, list | tuple):
        if not tokens:
            return np.empty(0, dtype=np.int32)
        try:
            ids = np.asarray(tokens)
        except (ValueError, OverflowError) as error:  # ragged, or beyond 64 bits
            raise ArgumentError(argument, f"a {type(tokens).__name__}", f"integers, 0 to {_LARGEST}") from error
        if ids.dtype.kind == "O":
            raise ArgumentError(argument, f"a {type(tokens).__name__} of objects", f"integers, 0 to {_LARGEST}")
        return ids
    device = getattr(tokens, "device", None)
    if getattr(device, "type", None) is None:
        raise ArgumentError(argument, f"a {type(tokens).__name__}", "an int32 numpy array, a CPU torch tensor, a list or a tuple")
    tensor = cast("Tensor", tokens)
    if tensor.device.type != "cpu":
        raise ArgumentError(argument, f"a tensor on {device}", "token ids on the CPU: call .cpu() where you can afford to wait")
    try:
        return tensor.detach().numpy()
    except TypeError as error:  # a dtype that numpy does not have
        raise ArgumentError(argument, f"a tensor of {tensor.dtype}", "integers (int32 is taken without copying)") from error
