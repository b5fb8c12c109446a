"""Sets up the clone: system packages, .venv, torch, Python packages, and the build of hetkv into .venv.

    python3 tools/bootstrap.py demo|test|bench|ci

Each step leaves a stamp in .stamps/ with a hash of everything it was made from; a step whose stamp still fits is skipped, so a
second run takes a fraction of a second. Only system packages are written outside the clone, and only when run as root.

Environment:
  TORCH               what to install as torch: a pip requirement or the path of a wheel (default: reuse one, else the pinned one)
  HETKV_CUDA          ON or OFF (default: ON with a GPU and nvcc, else OFF)
  HETKV_CUDA_ARCHITECTURES  ci, all, or a list as for CMake (default: the GPU here, else ci)
  HETKV_NVCC          path of nvcc
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - an older Python gets this line instead of a syntax error
    sys.exit(f"hetkv needs python3 >= 3.11, this is {sys.version.split()[0]}: install one, say `make PYTHON=python3.11 ...`")

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import threading
import time
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMPS = ROOT / ".stamps"
PYTHON = VENV / "bin" / "python"
LINKS = ROOT / ".cache" / "caller"  # of the calling Python: torch and what it needs
TORCH_FLOOR = (2, 10)
TORCH_PINNED = "torch==2.13.0"
# What each target needs: package groups of pyproject.toml.
LEVELS = {
    "build": ["build"],
    "demo": ["build", "demo"],
    "test": ["build", "demo", "test"],
    "bench": ["build", "demo", "test"],
    "ci": ["build", "demo", "test", "ci"],
}


def say(text: str) -> None:
    print(f"[hetkv] {text}", flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None, log: str | None = None) -> None:
    """Runs a command with its output on the terminal, or in .stamps/`log`. Exits with its name and that log if it fails."""
    file = (STAMPS / log).open("w") if log else None
    with file or contextlib.nullcontext():
        result = subprocess.run([str(part) for part in command], cwd=ROOT, env=env, check=False, stdout=file, stderr=file)
    if result.returncode != 0:
        if log:
            print((STAMPS / log).read_text(), file=sys.stderr)
        sys.exit(f"[hetkv] failed ({result.returncode}): {' '.join(str(part) for part in command)}")


def answer(*command: str | Path, timeout: float = 60) -> str | None:
    """The standard output of a command, or None if it failed or is not there."""
    try:
        result = subprocess.run([str(p) for p in command], capture_output=True, text=True, timeout=timeout, check=False, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def contents(*folders: str) -> dict[str, str]:
    """Path and content hash of every file below the given files and folders of the clone."""
    files: list[Path] = []
    for folder in folders:
        path = ROOT / folder
        files += [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(files)}


def fresh(name: str, key: str) -> bool:
    stamp = STAMPS / name
    return stamp.is_file() and stamp.read_text() == key


def stamp(name: str, key: str) -> None:
    (STAMPS / name).write_text(key)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Says what begins, every 15 seconds that it still runs, and how long it took."""
    say(f"{title} ...")
    begin = time.monotonic()
    over = threading.Event()

    def heartbeat() -> None:
        while not over.wait(15):
            say(f"  ... {time.monotonic() - begin:.0f} s")

    beat = threading.Thread(target=heartbeat, daemon=True)
    beat.start()
    try:
        yield
    finally:
        over.set()
        beat.join()
    say(f"{title}: done in {time.monotonic() - begin:.0f} s")


# --- system packages ---------------------------------------------------------------------------------------------------------


def compiles(source: str) -> bool:
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        return subprocess.run(command, input=source, capture_output=True, text=True, check=False).returncode == 0
    except OSError:
        return False


def missing_system_packages(level: str) -> list[str]:
    """Debian names of what is not there. Looks for the thing itself, not for the package."""
    missing = []
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        missing.append("python3-venv")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("python3-dev")
    if not compiles("#include <span>\nint main() { return 0; }"):
        missing.append("g++")
    if not compiles("#include <xxhash.h>"):
        missing.append("libxxhash-dev")
    if level in ("test", "ci") and not Path("/usr/src/googletest/CMakeLists.txt").is_file():
        missing.append("googletest")
    if level in ("test", "ci") and not compiles("#include <zstd.h>"):  # optional: without it bundles are not compressed
        missing.append("libzstd-dev")
    return missing


def system_packages(level: str) -> None:
    key = digest(level, sys.prefix, sys.version)
    if fresh(f"system-{level}", key):
        return
    missing = missing_system_packages(level)
    if missing:
        line = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
        if "g++" in missing:  # Debian's g++ alone lacks the C library's headers when nothing is recommended
            line = line.replace("g++", "g++ libc6-dev")
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            sys.exit(f"[hetkv] system packages are missing; paste this, then try again:\n  sudo {line}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        with step(f"Installing system packages: {' '.join(missing)}"):
            run("apt-get", "update", "-qq", env=environment, log="apt.log")
            run(*line.split(), "-qq", "-o", "Dpkg::Use-Pty=0", env=environment, log="apt.log")
        importlib.invalidate_caches()
        left = missing_system_packages(level)
        if left:
            sys.exit(
                f"[hetkv] still missing after installation: {' '.join(left)} (compiler too old, or a python3 of another kind?)"
            )
    stamp(f"system-{level}", key)


# --- the environment ---------------------------------------------------------------------------------------------------------


def version_of(text: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def reusable_torch() -> dict[str, str] | None:
    """Version and folder of the torch that the calling Python has, if it is new enough. Looked up, not imported."""
    try:
        spec = importlib.util.find_spec("torch")
        version = importlib.metadata.version("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or version_of(version) < TORCH_FLOOR:
        return None
    return {"version": version, "folder": str(Path(spec.origin).parent.parent)}


def make_environment() -> None:
    """.venv, with a torch in it: TORCH if set, else the caller's if it can be reused, else the pinned one."""
    wanted = os.environ.get("TORCH", "")
    reused = None if wanted else reusable_torch()
    key = digest(sys.prefix, sys.version, wanted, reused, TORCH_PINNED)
    if fresh("venv", key) and PYTHON.exists():
        return
    with step("Making .venv"):
        (STAMPS / "venv").unlink(missing_ok=True)
        shutil.rmtree(VENV, ignore_errors=True)
        for old in STAMPS.glob("packages-*"):
            old.unlink()
        (STAMPS / "hetkv").unlink(missing_ok=True)
        run(sys.executable, "-m", "venv", VENV)
    if reused and not link_caller():
        say(f"torch {reused['version']} in {reused['folder']} cannot be imported from .venv; installing {TORCH_PINNED} instead")
        reused = None
    if reused:
        say(f"Reusing torch {reused['version']} from {reused['folder']}")
    else:
        install_torch(wanted or TORCH_PINNED)
    if answer(PYTHON, "-c", "import torch", timeout=300) is None:
        sys.exit("[hetkv] torch was installed but cannot be imported: .venv/bin/python -c 'import torch' says why")
    stamp("caller", sys.executable)
    stamp("venv", key)


def link_caller() -> bool:
    """Lets .venv see the caller's torch and what torch needs, and nothing else of the caller's: a folder of links on its path.

    The folder lies outside .venv, so that pip never takes the caller's packages for its own and removes them.
    """
    shutil.rmtree(LINKS, ignore_errors=True)
    LINKS.mkdir(parents=True)
    folders = [str(LINKS)]
    todo, seen = ["torch"], set()
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an optional requirement, or one for another platform
        todo += [match[0] for text in package.requires or [] if "extra ==" not in text and (match := re.match(r"[\w.-]+", text))]
        if package.files is None:  # no list of files: take the whole folder
            folders.append(str(package.locate_file("")))
        for top in {file.parts[0] for file in package.files or []} - {"..", "bin", "__pycache__"}:
            link = LINKS / top
            if not link.is_symlink():
                link.symlink_to(Path(str(package.locate_file(top))))
    site = answer(PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    if site is None:
        return False
    path_file = Path(site) / "zz_caller.pth"
    path_file.write_text("\n".join(dict.fromkeys(folders)) + "\n")
    if answer(PYTHON, "-c", "import torch", timeout=300) is not None:
        return True
    path_file.unlink()
    return False


def download_sizes(report: str) -> tuple[int, bool, int]:
    """Bytes to download by pip's report, whether every size is known, and the number of packages."""
    items = json.loads(report)["install"]
    total, known = 0, True
    for item in items:
        url = item["download_info"]["url"]
        parts = urllib.parse.urlsplit(url)
        try:
            if parts.scheme == "file":
                total += Path(urllib.parse.unquote(parts.path)).stat().st_size
            else:
                request = urllib.request.Request(url, method="HEAD")
                with urllib.request.urlopen(request, timeout=5) as reply:
                    total += int(reply.headers["Content-Length"])
        except (OSError, TypeError, ValueError):
            known = False
    return total, known, len(items)


def install_torch(requirement: str) -> None:
    if requirement.endswith(".whl"):
        wheel = Path(requirement).expanduser().resolve()
        if not wheel.is_file():
            sys.exit(f"[hetkv] TORCH={requirement}: no such file")
        requirement = str(wheel)
    elif not re.match(r"torch\b", requirement):
        requirement = f"torch=={requirement}"  # TORCH=2.12.1
    say(f"No torch >= 2.10 is reused: {requirement} will be installed into .venv (TORCH=... overrides)")
    plan = answer(PYTHON, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", requirement, timeout=600)
    size = "up to 3 GB with CUDA libraries, about 0.2 GB without"
    if plan is not None:
        with contextlib.suppress(ValueError, KeyError):
            total, known, count = download_sizes(plan)
            if total:
                size = f"{'' if known else 'at least '}{total / 1e6:,.0f} MB in {count} packages"
    say(f"To download for torch: {size}")
    with step(f"Installing {Path(requirement).name}"):
        run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q", requirement)


def install_packages(level: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["dependency-groups"]
    wanted = [requirement for group in LEVELS[level] for requirement in groups[group]]
    key = digest(wanted, (STAMPS / "venv").read_text())
    if any(
        fresh(f"packages-{other}", digest([r for g in LEVELS[other] for r in groups[g]], (STAMPS / "venv").read_text()))
        for other in LEVELS
        if set(LEVELS[other]) >= set(LEVELS[level])
    ):
        return
    with step(f"Installing Python packages ({', '.join(LEVELS[level])}): {len(wanted)} and what they need"):
        run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q", *wanted)
    stamp(f"packages-{level}", key)


# --- the build ---------------------------------------------------------------------------------------------------------------


def find_nvcc() -> str | None:
    """HETKV_NVCC, CUDACXX, the PATH, the usual folder, then PyPI's nvidia-cuda-nvcc in .venv. None below version 12.0."""
    named = os.environ.get("HETKV_NVCC")
    candidates = [named] if named else [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    if not named:
        candidates += sorted(str(p) for p in VENV.glob("lib/python*/site-packages/nvidia/*/bin/nvcc"))
    for candidate in filter(None, candidates):
        match = re.search(r"release (\d+)\.(\d+)", answer(candidate, "--version") or "")
        if match and int(match[1]) >= 12:
            return candidate
    if named:
        sys.exit(f"[hetkv] HETKV_NVCC={named}: not an nvcc >= 12.0")
    return None


def gpu_architecture() -> str | None:
    """The first visible GPU as CMake writes it, or None."""
    text = answer("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader")
    match = re.match(r"(\d+)\.(\d+)", text or "")
    if not match:
        return None
    number = match[1] + match[2]
    return f"{number}a-real;{number}-virtual" if number == "90" else f"{number}-real;{number}-virtual"


def cuda_choice() -> dict[str, str]:
    """CMake's settings for CUDA, from the environment and the machine."""
    choice = os.environ.get("HETKV_CUDA", "")
    if choice not in ("", "ON", "OFF", "AUTO"):
        sys.exit(f"[hetkv] HETKV_CUDA={choice}: expected ON, OFF or AUTO")
    gpu = gpu_architecture() if choice != "OFF" else None
    if choice == "OFF" or (choice == "" and gpu is None):
        return {"HETKV_CUDA": "OFF"}
    nvcc = find_nvcc()
    if nvcc is None:
        if choice == "ON":
            sys.exit("[hetkv] HETKV_CUDA=ON, but no nvcc >= 12.0: install a CUDA toolkit, or set HETKV_NVCC")
        if gpu:
            say("There is a GPU but no nvcc >= 12.0: building without CUDA kernels")
        return {"HETKV_CUDA": "OFF"}
    architectures = os.environ.get("HETKV_CUDA_ARCHITECTURES") or gpu or "ci"
    return {"HETKV_CUDA": "ON", "CMAKE_CUDA_COMPILER": nvcc, "HETKV_CUDA_ARCHITECTURES": architectures}


def tool_environment() -> dict[str, str]:
    """The environment with .venv's cmake and ninja first."""
    return {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(VENV)}


def build_hetkv() -> None:
    """Compiles _core and _ops and installs hetkv, editable, into .venv. Python files are used from the clone as they are."""
    cuda = cuda_choice()
    modules = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "python").rglob("*.py"))]
    sources = contents("CMakeLists.txt", "cmake", "csrc", "pyproject.toml")
    key = digest(sources, modules, cuda, os.environ.get("HETKV_WERROR", ""), (STAMPS / "venv").read_text())
    if fresh("hetkv", key):
        return
    environment = tool_environment()
    environment["CMAKE_ARGS"] = shlex.join(f"-D{name}={value}" for name, value in cuda.items())
    (STAMPS / "cmake_args").write_text(environment["CMAKE_ARGS"])  # .ci/run builds its wheel the same way
    environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
    flavour = f"CUDA {cuda['HETKV_CUDA_ARCHITECTURES']}" if cuda["HETKV_CUDA"] == "ON" else "CPU"
    with step(f"Building hetkv ({flavour})"):
        run(PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-build-isolation", "--no-deps", "-e", ".",
            env=environment)  # fmt: skip
    stamp("hetkv", key)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sets up .venv for a make target.")
    parser.add_argument("level", choices=sorted(LEVELS))
    level = parser.parse_args().level
    if Path(sys.prefix) == VENV:  # called from the activated .venv: it cannot remake itself
        remembered = STAMPS / "caller"
        caller = remembered.read_text() if remembered.is_file() else str(getattr(sys, "_base_executable", sys.executable))
        os.execv(caller, [caller, *sys.argv])
    STAMPS.mkdir(exist_ok=True)
    with (STAMPS / "lock").open("w") as lock:  # two makes at once take turns
        fcntl.flock(lock, fcntl.LOCK_EX)
        system_packages(level)
        make_environment()
        install_packages(level)
        build_hetkv()


if __name__ == "__main__":
    main()
