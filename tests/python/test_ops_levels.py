"""The op tests again at every narrower level that this machine has: each level is other machine code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hetkv.ops

HERE = Path(__file__).parent
FILES = (
    "test_ops_write.py",
    "test_ops_compress.py",
    "test_ops_paged_attention.py",
    "test_ops_sparse.py",
    "test_ops_sparse_tokens.py",
    "test_ops_block_sparse.py",
)
NARROWER = hetkv.ops.CPU_LEVELS[: hetkv.ops.CPU_LEVELS.index(hetkv.ops.cpu_level())]


@pytest.mark.skipif(not NARROWER, reason="this process runs at the narrowest level already")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", NARROWER)
def test_ops_at_a_narrower_level(level: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "not opcheck and not refusals", *FILES]
    done = subprocess.run(
        command, cwd=HERE, env={**os.environ, "HETKV_CPU_LEVEL": level}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
