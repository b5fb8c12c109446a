"""The README's usage example runs as it stands and prints what its comments say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_usage_example_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    first, second = printed.getvalue().splitlines()
    assert first == "resume at 96 of 102 tokens (hash hit 96); lost: 6 granularity"
    assert second == "resume at 0 of 102 tokens (hash hit 96); lost: 6 granularity, 96 window_evicted in swa"
