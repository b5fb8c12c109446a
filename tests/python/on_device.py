"""Runs the tests of the ops on another device: as a pytest plugin for whole files, or called from a test.

    HETKV_TEST_DEVICE=cuda PYTHONPATH=tests/python pytest -p on_device tests/python/test_ops_write.py

The functions of ``hetkv.ops`` are replaced by ones that copy their tensors to the device, call the op there, and copy back what
it returned and what it wrote. So every test that compares with a float64 reference on the CPU does so for the device's kernels.
Where an op has no kernel for the device, or says that it does not take something on CUDA, a test is skipped and the reason
counted. With HETKV_TEST_DEVICE=cpu all of it runs on copies on the CPU, which is how this file is tried without a GPU.
"""

from __future__ import annotations

import collections
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, NoReturn

import hypothesis
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import hetkv.ops

DEVICE = torch.device(os.environ.get("HETKV_TEST_DEVICE", "cuda"))
OPS = [name for name in hetkv.ops.__all__ if name.islower() and name != "cpu_level"]
# Tests of what happens before a kernel, of the CPU's levels, or of memory that only the CPU can pretend to have.
NOT_OF_THE_DEVICE = ("refus", "opcheck", "compile", "level", "far_", "takes_strided_rows_and_refuses")

_missing: collections.Counter[str] = collections.Counter()  # why tests or examples were left out


def available() -> bool:
    return DEVICE.type == "cpu" or torch.cuda.is_available()


def has_kernel(op: str) -> bool:
    key = "CPU" if DEVICE.type == "cpu" else "CUDA"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"hetkv::{op}", key))


def need_kernel(op: str) -> None:
    if not has_kernel(op):
        _leave_out(f"{op}: no {DEVICE.type.upper()} kernel")


def _leave_out(reason: str) -> NoReturn:
    """Skips the test, or, inside of a hypothesis test whose other examples may run, this example."""
    _missing[reason] += 1
    if hypothesis.currently_in_test_context() and "no CUDA kernel" not in reason:
        hypothesis.reject()
    pytest.skip(reason)


def to_device(tensor: Tensor, device: torch.device = DEVICE) -> Tensor:
    """A copy with the same strides, at an address as round as a GPU's allocations have."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = extent * tensor.itemsize if tensor.numel() else 0
    # Not a byte too many on a GPU: compute-sanitizer sees what lies behind.
    raw = torch.zeros(count + (512 if device.type == "cpu" else 0), dtype=torch.uint8, device=device)
    flat = raw.narrow(0, -raw.data_ptr() % 512 if device.type == "cpu" else 0, count).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride()).copy_(tensor.detach())


def written_arguments(op: str) -> list[str]:
    schema = getattr(torch.ops.hetkv, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def on_device(op: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The op's function, on copies of its CPU tensors. Tensors that are on the device already stay what they are."""
    signature, written = inspect.signature(function), written_arguments(op)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        need_kernel(op)
        bound = signature.bind(*args, **kwargs)
        given = {
            name: value for name, value in bound.arguments.items() if isinstance(value, Tensor) and value.device.type == "cpu"
        }
        if len(given) < sum(isinstance(value, Tensor) for value in bound.arguments.values()):
            return function(*args, **kwargs)
        copies = {id(value): to_device(value) for value in given.values()}  # a tensor given twice stays one
        bound.arguments.update({name: copies[id(value)] for name, value in given.items()})
        try:
            result = function(*bound.args, **bound.kwargs)
        except ValueError as error:
            if "CUDA" not in str(error):
                raise
            _leave_out(str(error))
        for name in written:
            given[name].copy_(copies[id(given[name])])
        return pytree.tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, result)

    call.runs_on_device = True  # type: ignore[attr-defined]
    return call


def install(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replaces the ops' functions; `patch` as setattr, or a monkeypatch's."""
    for op in OPS:
        function = getattr(hetkv.ops, op)
        if not hasattr(function, "runs_on_device"):
            patch(hetkv.ops, op, on_device(op, function))


# --- the plugin --------------------------------------------------------------------------------------------------------------


def pytest_configure() -> None:
    if available():
        install()


def pytest_report_header() -> list[str]:
    lacking = [op for op in OPS if not has_kernel(op)]
    return [f"ops on {DEVICE}; no kernel: {', '.join(lacking) or 'none lacks one'}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not available():
        raise pytest.UsageError(f"HETKV_TEST_DEVICE = {DEVICE}: there is no such device")
    kept = [item for item in items if not any(part in item.name for part in NOT_OF_THE_DEVICE)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reason, count in sorted(_missing.items()):
        terminalreporter.write_line(f"left out {count} times: {reason}")
