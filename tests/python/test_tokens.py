"""Every form of token ids that the surface takes, and how it refuses the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import hetkv
from hetkv.tokens import as_token_ids

Tokens = npt.NDArray[np.int32]
Serve = Callable[..., hetkv.Sequence]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


FORMS: dict[str, Callable[[Tokens], Any]] = {
    "int32 array": lambda t: t,
    "read-only array": lambda t: np.frombuffer(t.tobytes(), dtype=np.int32),
    "int64 array": lambda t: t.astype(np.int64),
    "uint16 array": lambda t: t.astype(np.uint16),
    "big-endian array": lambda t: t.astype(">i4"),
    "int32 tensor": torch.from_numpy,
    "int64 tensor": lambda t: torch.from_numpy(t).long(),
    "list": lambda t: t.tolist(),
    "tuple": lambda t: tuple(t.tolist()),
    "list of numpy ints": list,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_tokens_is_the_same_prompt(
    form: Callable[[Tokens], Any], cache: hetkv.Cache, prompt: Tokens, serve: Serve
) -> None:
    serve(cache, prompt).free()
    with cache.admit(form(prompt)) as seq:
        assert seq.num_computed_tokens == 96
        assert seq.num_tokens == 100
    assert cache.probe(form(prompt)).num_recoverable_tokens == 96


def test_int32_is_not_copied() -> None:
    array = np.arange(5, dtype=np.int32)
    assert as_token_ids(array) is array
    tensor = torch.arange(5, dtype=torch.int32)
    assert as_token_ids(tensor).ctypes.data == tensor.data_ptr()


REFUSED: dict[str, tuple[Any, str]] = {
    "empty list": ([], "no tokens"),
    "empty array": (np.empty(0, np.int32), "no tokens"),
    "negative int32": (np.array([1, -5], np.int32), "-5"),
    "negative int64": (np.array([1, -5]), "-5"),
    "negative in a list": ([3, -1], "-1"),
    "over 2**31 - 1": ([1, 2**31], "2147483648"),
    "over 64 bits": ([2**70], "objects"),
    "two dimensions": (np.zeros((2, 3), np.int32), "2 dimensions"),
    "no dimension": (np.array(3, np.int32), "0 dimensions"),
    "nested list": ([[1, 2], [3, 4]], "2 dimensions"),
    "ragged list": ([[1, 2], [3]], "a list"),
    "strided": (np.arange(10, dtype=np.int32)[::2], "strided"),
    "strided tensor": (torch.arange(10, dtype=torch.int32)[::2], "strided"),
    "floats": (np.array([1.0, 2.0]), "float64"),
    "bfloat16 tensor": (torch.ones(3, dtype=torch.bfloat16), "bfloat16"),
    "bools": ([True, False], "bool"),
    "a string": ("hello", "a str"),
    "None": (None, "a NoneType"),
    "a tensor elsewhere": (torch.empty(3, dtype=torch.int32, device="meta"), "a tensor on meta"),
}


@pytest.mark.parametrize(("tokens", "value"), REFUSED.values(), ids=REFUSED)
def test_bad_tokens_are_refused_by_name(tokens: Any, value: str, cache: hetkv.Cache) -> None:
    for call in (cache.probe, cache.admit, cache.pin_prefix):
        with pytest.raises(hetkv.ArgumentError) as caught:
            call(tokens)
        assert isinstance(caught.value, ValueError)
        assert caught.value.argument.startswith("tokens")
        assert value in caught.value.value
    assert cache.stats()["admissions"] == 0


def test_append_takes_one_id_or_many(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        seq.append(7)
        seq.append(np.int64(8))
        seq.append([9, 10])
        seq.append(np.empty(0, np.int32))
        assert seq.num_tokens == 104
        for bad in (-1, 2**31, [1, -1], 1.5):
            with pytest.raises(hetkv.ArgumentError) as caught:
                seq.append(bad)  # type: ignore[arg-type]
            assert caught.value.argument.startswith("ids")
        assert seq.num_tokens == 104
