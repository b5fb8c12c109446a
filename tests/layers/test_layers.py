"""The order of the layers, read from the sources: csrc/README.md says it in words, these tests hold it.

They read text. Nothing is compiled or imported.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

# folder -> folders of csrc that it may include from, and patterns of foreign headers that it may use.
LAYERS: dict[str, tuple[set[str], list[str]]] = {
    "base": (set(), [r"xxhash\.h", r"xxh3\.h", r"immintrin\.h", r"(sys|linux)/.*\.h", r"(unistd|sched|cpuid)\.h"]),
    "allocator": ({"base"}, [r"xxhash\.h", r"zstd\.h", r"(sys|linux)/.*\.h", r"(unistd|fcntl|dirent)\.h"]),
    "kernels": ({"base"}, [r"immintrin\.h"]),
    "kernels/cuda": ({"base"}, [r"cuda.*\.h", r"cuda/.*", r"mma\.h"]),
    "ops": ({"base", "kernels"}, [r"torch/csrc/stable/(library|tensor|ops|accelerator)\.h", r"torch/headeronly/.*\.h",
                                  r"torch/csrc/inductor/aoti_torch/c/shim\.h"]),
    "bindings": ({"base", "allocator"}, [r"pybind11/.*", r"Python\.h"]),
}  # fmt: skip
STANDARD = re.compile(r"[a-z_0-9]+$|(assert|math|stdint|stddef|string)\.h$")  # <vector>, <cstdint>
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)

# Layers of python/hetkv, bottom first: a module imports only from its own layer and from those above it in this list.
PYTHON_LAYERS = ["_", "", "integrations", "stores", "tools"]


def sources() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def layer_of(path: Path) -> str:
    parts = path.relative_to(CSRC).parts
    return "kernels/cuda" if parts[:2] == ("kernels", "cuda") else parts[0]


def wrong_includes(path: Path, text: str) -> list[str]:
    """The includes of one file that its layer forbids, each with its reason."""
    layer = layer_of(path)
    below, foreign = LAYERS[layer]
    own = layer.split("/")[0]
    wrong = []
    for quoted, angled in INCLUDE.findall(text):
        if quoted:
            folder = quoted.split("/")[0]
            if not (CSRC / quoted).is_file():
                wrong.append(f'"{quoted}": not a file below csrc/')
            elif folder != own and folder not in below:
                wrong.append(f'"{quoted}": {own} may not include from {folder}')
            elif quoted.startswith("kernels/cuda/") and layer == "kernels":
                wrong.append(f'"{quoted}": only cuda/ and ops see what is in kernels/cuda')
        elif not STANDARD.match(angled) and not any(re.fullmatch(pattern, angled) for pattern in foreign):
            wrong.append(f"<{angled}>: not a header that {layer} may use")
    return wrong


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_follow_the_order(path: Path) -> None:
    assert wrong_includes(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("allocator/x.cpp", '#include "kernels/row_copy.h"'),
        ("allocator/x.cpp", "#include <torch/csrc/stable/tensor.h>"),
        ("allocator/x.cpp", "#include <cuda_runtime.h>"),
        ("allocator/x.cpp", "#include <pybind11/pybind11.h>"),
        ("base/x.h", '#include "allocator/arena.h"'),
        ("kernels/cpu/x.cpp", '#include "allocator/arena.h"'),
        ("kernels/cpu/x.cpp", "#include <cuda_runtime.h>"),
        ("kernels/cuda/x.cu", "#include <torch/headeronly/core/ScalarType.h>"),
        ("ops/x.cpp", '#include "allocator/arena.h"'),
        ("ops/x.cpp", "#include <ATen/ATen.h>"),
        ("ops/x.cpp", "#include <Python.h>"),
        ("bindings/x.cpp", '#include "kernels/row_copy.h"'),
        ("allocator/x.cpp", '#include "arena.h"'),
    ],
)
def test_a_wrong_include_is_found(file: str, line: str) -> None:
    assert len(wrong_includes(CSRC / file, f"#include <vector>\n  {line}\n")) == 1


def listed(folder: Path) -> set[Path]:
    """Sources that the CMakeLists.txt of a folder names."""
    text = (folder / "CMakeLists.txt").read_text()
    return {folder / name for name in re.findall(r"[\w/]+\.(?:cpp|cu)\b", text)}


@pytest.mark.parametrize("folder", ["base", "allocator", "kernels", "ops", "bindings"])
def test_every_source_is_listed_and_there(folder: str) -> None:
    there = {p for p in (CSRC / folder).rglob("*") if p.suffix in {".cpp", ".cu"}}
    assert listed(CSRC / folder) == there


@pytest.mark.parametrize("folder", ["base", "allocator", "kernels", "ops", "bindings"])
def test_lists_of_sources_are_sorted(folder: str) -> None:
    text = (CSRC / folder / "CMakeLists.txt").read_text()
    for block in re.findall(r"\(\w+(?: [A-Z]+)?\n((?:\s+[\w/]+\.(?:cpp|cu)\n)+)", text):
        names = block.split()
        assert names == sorted(names)


def test_every_cpp_test_is_listed() -> None:
    folder = ROOT / "tests" / "cpp"
    names = re.findall(r"^hetkv_cpp_test\((\w+)", (folder / "CMakeLists.txt").read_text(), re.MULTILINE)
    assert names == sorted(names)
    assert set(names) == {p.stem for p in folder.glob("test_*.cpp")}


def test_headers_are_included_once() -> None:
    without = [str(p.relative_to(CSRC)) for p in sources() if p.suffix in {".h", ".cuh"} and "#pragma once" not in p.read_text()]
    assert without == []


def test_no_banned_file_names() -> None:
    banned = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    roots = [CSRC, ROOT / "python", ROOT / "tests", ROOT / "bench", ROOT / "tools"]
    found = [str(p.relative_to(ROOT)) for root in roots for p in root.rglob("*") if p.stem in banned]
    assert found == []


# --- Python ------------------------------------------------------------------------------------------------------------------


def python_layer(module: str) -> int | None:
    """The layer of a dotted name below hetkv, or None for what is not hetkv's."""
    parts = module.split(".")
    if parts[0] != "hetkv":
        return None
    first = parts[1] if len(parts) > 1 else ""
    if first in PYTHON_LAYERS:
        return PYTHON_LAYERS.index(first)
    return PYTHON_LAYERS.index("_" if first.startswith("_") else "")


def imports_of(text: str, module: str, is_package: bool) -> list[str]:
    """Every module that a file imports, anywhere in it, as absolute names."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{stem}.{alias.name}" for alias in node.names]
    return names


def wrong_imports(text: str, module: str, is_package: bool = False) -> list[str]:
    own = python_layer(module)
    assert own is not None
    wrong = []
    for name in imports_of(text, module, is_package):
        layer = python_layer(name)
        if layer is not None and layer > own and name.split(".")[1] in PYTHON_LAYERS[2:]:
            wrong.append(f"{module} imports {name}")
        if name.split(".")[0] == "transformers" and own < PYTHON_LAYERS.index("integrations"):
            wrong.append(f"{module} imports {name}: only integrations and tools may")
    return wrong


def python_modules() -> list[Path]:
    return sorted((ROOT / "python" / "hetkv").rglob("*.py"))


@pytest.mark.parametrize("path", python_modules(), ids=lambda p: str(p.relative_to(ROOT / "python")))
def test_imports_follow_the_order(path: Path) -> None:
    parts = list(path.relative_to(ROOT / "python").with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert wrong_imports(path.read_text(), module, is_package) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("hetkv.cache", "from hetkv.integrations import transformers"),
        ("hetkv.cache", "from .integrations.transformers import attach"),
        ("hetkv.layout", "import hetkv.tools.cli"),
        ("hetkv.integrations.transformers", "def f():\n    from hetkv.tools import report"),
        ("hetkv.cache", "import transformers"),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str) -> None:
    assert len(wrong_imports(line, module)) == 1
