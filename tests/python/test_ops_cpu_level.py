"""The instruction-set level of the CPU kernels: chosen once per process, forced by the environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hetkv.ops

LEVELS = ("portable", "avx2", "avx512")


def level_of_a_process(forced: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "HETKV_CPU_LEVEL"}
    if forced is not None:
        environment["HETKV_CPU_LEVEL"] = forced
    code = "import hetkv.ops; print(hetkv.ops.cpu_level())"
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_every_level_up_to_the_best_can_be_forced() -> None:
    best = level_of_a_process(None).stdout.strip()
    assert best in LEVELS
    for level in LEVELS:
        result = level_of_a_process(level)
        if LEVELS.index(level) <= LEVELS.index(best):
            assert result.stdout.strip() == level
        else:
            assert "ValueError" in result.stderr
            assert f"HETKV_CPU_LEVEL = {level}" in result.stderr


def test_an_unknown_level_is_refused() -> None:
    result = level_of_a_process("sse9")
    assert result.returncode != 0
    assert "HETKV_CPU_LEVEL = sse9: expected portable, avx2 or avx512" in result.stderr


def test_a_process_keeps_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hetkv.ops.cpu_level()
    monkeypatch.setenv("HETKV_CPU_LEVEL", "portable")
    assert hetkv.ops.cpu_level() == before
