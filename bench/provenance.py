"""Where numbers come from: commit, processor, load, command. Every file in bench/results carries it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def provenance() -> dict[str, Any]:
    """Commit (with `+` if sources differ from it), processor, cores, time and command, without absolute paths."""

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        except OSError:  # no git on a machine that only measures
            return ""
        return done.stdout.strip()

    dirty = git("status", "--porcelain", "--", "csrc", "bench/cpp", "CMakeLists.txt", "cmake")
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+" if dirty else ""),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.orig_argv[0]).name, *(_without_folders(a) for a in sys.orig_argv[1:])]),
    }


def processor() -> str:
    """Name, family, model and the vector extensions that matter here."""
    facts: dict[str, str] = {}
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = facts.get("flags", "").split()
    wide = ", ".join(flag for flag in ("avx2", "avx512f", "amx_tile") if flag in flags)
    return (
        f"{facts.get('model name', platform.processor())} (family {facts.get('cpu family')}, model {facts.get('model')}; {wide})"
    )


def load_average() -> list[float]:
    """Of 1, 5 and 15 minutes: above 0 before the run starts, other programs had the cores."""
    return [round(value, 2) for value in os.getloadavg()]


def write_results(name: str, content: dict[str, Any]) -> Path:
    """Writes bench/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _without_folders(argument: str) -> str:
    """A command that others can read: no path of this machine."""
    name, equals, value = argument.partition("=")
    if equals:
        return f"{name}={_without_folders(value)}"
    return Path(argument).name if argument.startswith("/") else argument
