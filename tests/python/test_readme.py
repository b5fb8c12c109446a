"""The README's usage examples run as they stand and print what their comments say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import hetkv

README = Path(__file__).parents[2] / "README.md"


def run_example(number: int, names: dict[str, Any]) -> list[str]:
    """Runs the README's Python block of that number, with `names` there; what it printed, by line."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[number]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), names)
    return printed.getvalue().splitlines()


def test_usage_example_runs() -> None:
    first, second = run_example(0, {})
    assert first == "resume at 96 of 102 tokens (hash hit 96); lost: 6 granularity"
    assert second == "resume at 0 of 102 tokens (hash hit 96); lost: 6 granularity, 96 window_evicted in swa"


def test_example_with_a_model_runs() -> None:
    pytest.importorskip("transformers")
    from tiny_models import BUILDERS, VOCABULARY

    names = {"hetkv": hetkv, "model": BUILDERS["gemma3"](), "prompt_ids": [i % VOCABULARY for i in range(100)]}
    (line,) = run_example(1, names)
    assert line == "resume at 0 of 100 tokens (hash hit 0); lost: 36 granularity, 64 not_found"
    assert len(names["answer"]) == 200  # type: ignore[arg-type]


def test_example_of_attaching_runs() -> None:
    pytest.importorskip("transformers")
    import torch

    from tiny_models import BUILDERS, VOCABULARY

    model = BUILDERS["gemma3"]()
    cache = hetkv.Cache(hetkv.CacheLayout.from_config(model.config, block_size=64), capacity="16MiB")
    names = {"torch": torch, "model": model, "cache": cache, "prompt_ids": [i % VOCABULARY for i in range(100)]}
    assert run_example(2, names) == []
    assert [len(answer.tokens) for answer in names["answers"]] == [20, 20]
