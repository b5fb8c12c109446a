"""The surface that ARCHITECTURE.md documents is there."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import hetkv

Tokens = npt.NDArray[np.int32]

# A call that does not come back runs in C++ without the GIL, where a signal cannot end it.
pytestmark = pytest.mark.timeout(60, method="thread")


def test_the_documented_surface_is_there(cache: hetkv.Cache, prompt: Tokens) -> None:
    text = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()
    block = re.search(r"## 2\. Public Python surface\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    with cache.admit(prompt) as seq:
        owners: dict[str, Any] = {"cache": cache, "seq": seq, "hetkv": hetkv, "CacheLayout": hetkv.CacheLayout}
        names = re.findall(r"\b(cache|seq|hetkv|CacheLayout)\.(\w+)", block[1])
        assert len(names) > 30
        for owner, name in names:
            assert hasattr(owners[owner], name), f"{owner}.{name}"
        calls = re.findall(r"\b(cache|seq)\.(\w+)\(([^)]*)\)", block[1])
        for owner, name, arguments in calls:
            parameters = inspect.signature(getattr(owners[owner], name)).parameters
            for keyword in re.findall(r"(\w+)=", arguments):
                assert keyword in parameters, f"{owner}.{name}({keyword}=)"


def test_what_owns_memory_is_not_pickled(cache: hetkv.Cache, prompt: Tokens) -> None:
    with cache.admit(prompt) as seq:
        for owner in (cache, seq):
            with pytest.raises(TypeError, match="pickled"):
                pickle.dumps(owner)
    report = cache.probe(prompt)
    assert pickle.loads(pickle.dumps(report)) == report
