"""Builds hetkv with one guard switched off at a time and requires the test of that guard to fail.

    .venv/bin/python tools/planted_faults.py [--jobs N] [MACRO ...]

The rows are in tests/planted_faults.toml. A fault passes here only if its test was found, ran, and failed: a build error, an
empty filter or a test that hangs counts against it. Exits with 1 if any fault went unnoticed.
"""

import argparse
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "faults"
TIMEOUT = 180  # seconds for one test
FLAGS = {"dev": "-O0 -g0", "tsan": "-O1 -g -fsanitize=thread -fno-omit-frame-pointer"}
# Without the finder of the editable install, so that the package in PYTHONPATH is the one that is imported.
PYTEST = (
    "import sys; sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != 'ScikitBuildRedirectingFinder'];"
    "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)


@dataclass
class Fault:
    macro: str
    why: str
    test: str = ""
    filter: str = "*"
    pytest: str = ""
    preset: str = "dev"


@dataclass
class Outcome:
    noticed: bool
    text: str
    log: str = ""


def read_table() -> list[Fault]:
    with (ROOT / "tests" / "planted_faults.toml").open("rb") as file:
        faults = [Fault(**row) for row in tomllib.load(file).get("fault", [])]
    for fault in faults:
        if bool(fault.test) == bool(fault.pytest) or fault.preset not in FLAGS:
            sys.exit(f"planted_faults.toml: {fault.macro}: one of `test` and `pytest`, and a preset of {', '.join(FLAGS)}")
    return faults


def sources_with(macro: str) -> list[str]:
    """The sources that see the macro, themselves or through what they include; all others are compiled as ever."""
    suffixes = {".h", ".cpp", ".cu", ".cuh"}
    files = {p: p.read_text() for f in ("csrc", "tests/cpp", "tests/simt") for p in (ROOT / f).rglob("*") if p.suffix in suffixes}
    seeing = {path for path, text in files.items() if re.search(rf"\b{macro}\b", text)}
    if not seeing:
        sys.exit(f"planted_faults.toml: {macro}: no source has it")
    includes = {
        path: {folder / name for name in re.findall(r'#\s*include\s*"([^"]+)"', text) for folder in (ROOT / "csrc", path.parent)}
        for path, text in files.items()
    }
    while more := {path for path in files if path not in seeing and includes[path] & seeing}:
        seeing |= more
    return sorted(str(p.relative_to(ROOT)) for p in seeing if p.suffix in {".cpp", ".cu"})


def call(command: list[str], environment: dict[str, str], timeout: float | None = None) -> tuple[int | None, str]:
    """Exit status (None: ran past the timeout) and output."""
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return None, ""
    return result.returncode, result.stdout + result.stderr


def test_program(fault: Fault) -> Path:
    """Inside the build folder. The executables of tests/simt are called simt_<file>."""
    return Path("tests", "simt" if fault.test.startswith("simt_") else "cpp", fault.test)


def build(fault: Fault, jobs: int, environment: dict[str, str]) -> tuple[Path, str | None]:
    """The build folder, and the log if the build failed. One folder per preset; only what sees the macro is compiled anew."""
    folder = FOLDER / (f"{fault.preset}-python" if fault.pytest else fault.preset)
    settings = {
        "CMAKE_BUILD_TYPE": "None",
        "CMAKE_CXX_FLAGS": FLAGS[fault.preset],
        "HETKV_TESTS": "OFF" if fault.pytest else "ON",
        "HETKV_PYTHON": "ON" if fault.pytest else "OFF",
        "HETKV_CUDA": "OFF",
        "HETKV_WERROR": "OFF",
        "HETKV_PLANTED_FAULT": fault.macro,
        "HETKV_PLANTED_FAULT_SOURCES": ";".join(sources_with(fault.macro)),
        "Python_EXECUTABLE": sys.executable,
    }
    target = "hetkv_core" if fault.pytest else test_program(fault).name
    configure = ["cmake", "-S", ".", "-B", str(folder), "-G", "Ninja", *(f"-D{name}={value}" for name, value in settings.items())]
    for command in (configure, ["cmake", "--build", str(folder), "-j", str(jobs), "--target", target]):
        status, log = call(command, environment)
        if status != 0:
            return folder, log
    return folder, None


def judge_cpp(fault: Fault, folder: Path, environment: dict[str, str]) -> Outcome:
    environment = {**environment, "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"}
    program = [str(folder / test_program(fault)), f"--gtest_filter={fault.filter}", "--gtest_brief=1"]
    status, log = call(program, environment, TIMEOUT)
    if status is None:
        return Outcome(False, f"ran past {TIMEOUT} s")
    if status == 0:
        return Outcome(False, "NO TEST MATCHES" if " 0 tests" in log or "no tests" in log.lower() else "NOT NOTICED", log)
    return Outcome(True, "aborted" if status < 0 else "failed")


def judge_python(fault: Fault, folder: Path, environment: dict[str, str]) -> Outcome:
    """Runs the test against a copy of the package whose _core is the faulty one."""
    site = folder / "site"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "hetkv", site / "hetkv", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (core,) = (folder / "csrc" / "bindings").glob("_core*.so")
    shutil.copy(core, site / "hetkv")
    installed = Path(sysconfig.get_path("purelib")) / "hetkv" / "_ops.so"
    if installed.is_file():
        shutil.copy(installed, site / "hetkv")
    command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}", fault.pytest]
    status, log = call(command, {**environment, "PYTHONPATH": str(site)}, 2 * TIMEOUT)
    if status == 1 and re.search(r"\d+ failed", log):
        return Outcome(True, "failed")
    if status is not None and status < 0:
        return Outcome(True, "aborted")
    return Outcome(False, "NOT NOTICED" if status == 0 else f"pytest ended with {status}", log)


def main() -> None:
    parser = argparse.ArgumentParser(description="Requires every planted fault to be noticed by its test.")
    parser.add_argument("macros", nargs="*", help="only these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    faults = [f for f in read_table() if not arguments.macros or f.macro in arguments.macros]
    if arguments.macros and len({f.macro for f in faults}) != len(set(arguments.macros)):
        sys.exit("planted_faults.toml: no such macro")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    faults.sort(key=lambda f: (f.preset, bool(f.pytest), f.macro))  # so that neighbours share a build folder

    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w")  # two runs in one folder would judge each other's builds; held until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)

    width = max((len(f.macro) for f in faults), default=0)
    unnoticed = []
    for fault in faults:
        begin = time.monotonic()
        folder, log = build(fault, arguments.jobs, environment)
        if log is not None:
            outcome = Outcome(False, "BUILD FAILED", log)
        else:
            outcome = (judge_python if fault.pytest else judge_cpp)(fault, folder, environment)
        seconds = time.monotonic() - begin
        where = fault.pytest or f"{fault.test} {fault.filter}"
        print(f"  {fault.macro:{width}}  {outcome.text:12}  {seconds:4.0f} s  {where}  ({fault.why})", flush=True)
        if not outcome.noticed:
            unnoticed.append(fault.macro)
            print("\n".join("    | " + line for line in outcome.log.splitlines()[-40:]), flush=True)
    print(f"planted faults: {len(faults) - len(unnoticed)} of {len(faults)} noticed", flush=True)
    if unnoticed:
        sys.exit("planted faults: not noticed: " + ", ".join(unnoticed))


if __name__ == "__main__":
    main()
