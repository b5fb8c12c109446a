#!/usr/bin/env bash
# All checks that need a GPU, in under five minutes: builds _ops for the card that is here, runs the op tests on it against
# float64, replays captured graphs with changed batches, runs compute-sanitizer on a few of them, and measures every op beside the
# card's own copy bandwidth and bf16 matmul rate.
#
#   bench/gpu_check.sh [--ops FILE] [--seconds 290] [--out FOLDER] [--device cpu]
#
#   --ops      an _ops.so that was built elsewhere (an older torch is fine from 2.10 on): nothing is compiled here
#   --seconds  for everything; a part that has no time left is named and left out
#   --out      where logs and ops_cuda.json go (default: build/gpu/out)
#   --device   cpu: the same parts on CPU tensors with the smallest sizes, to try the script without a GPU
#
# Needs a python3 (or $PYTHON) with torch >= 2.10, pytest and hypothesis; to build also nvcc >= 12.0, cmake >= 3.26, ninja,
# pybind11 >= 3.0, Python.h and xxhash.h. Nothing is downloaded or installed: what is missing is named. Only the ops are built,
# not the allocator, so the tests run on a package `hetkv` made of python/hetkv/ops and the library alone.
#
# Prints a line per part at the end. Exit status: 0 if no part failed. Ops without a CUDA kernel are named; they fail nothing.
set -uo pipefail
cd "$(dirname "$0")/.."

ops="" seconds=290 out="" device=cuda
while (($# > 0)); do
  case "$1" in
    --ops) ops=$2 ;;
    --seconds) seconds=$2 ;;
    --out) out=$2 ;;
    --device) device=$2 ;;
    *)
      sed -n '2,/^set -uo/{/^#/s/^# \{0,1\}//p}' "$0"
      exit 2
      ;;
  esac
  shift 2 || exit 2
done
python=${PYTHON:-python3}
build=$PWD/build/gpu
out=${out:-$build/out}
mkdir -p "$out"
summary=()
failed=0

say() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
left() { echo $((seconds - SECONDS)); }
note() { # state, part, what
  summary+=("$(printf '%-8s %-10s %s' "$1" "$2" "$3")")
  if [[ $1 == FAILED ]]; then failed=1; fi
}
finish() {
  say "summary"
  printf '%s\n' "${summary[@]}"
  exit "$failed"
}
# part NAME LIMIT LOG COMMAND...: runs it for at most LIMIT seconds, and never beyond the whole time.
part() {
  local name=$1 limit=$2 log=$out/$3 begin=$SECONDS status
  shift 3
  if (($(left) < 5)); then
    note "LEFT OUT" "$name" "no time left"
    return 1
  fi
  if (($(left) < limit)); then limit=$(left); fi
  say "$name"
  timeout -k 5 "$limit" "$@" 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  case $status in
    0) note ok "$name" "$((SECONDS - begin)) s" ;;
    124 | 137) note FAILED "$name" "did not end within $limit s" ;;
    *) note FAILED "$name" "exit status $status, see ${log#"$PWD"/}" ;;
  esac
  return "$status"
}
ask() { "$python" -c "$1" 2>/dev/null; }

# --- what is here -------------------------------------------------------------------------------------------------------------
say "machine"
echo "date      $(date -u '+%Y-%m-%d %H:%M UTC'), $(nproc) cores"
card=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null) || card="nvidia-smi: not there"
echo "card      $card"
torch=$(ask 'import torch; print(torch.__version__, "with CUDA", torch.version.cuda)') || torch=""
echo "torch     ${torch:-not there}"
nvcc=${CUDACXX:-$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null || true)}
echo "nvcc      $([[ -n $nvcc ]] && "$nvcc" --version | sed -n 's/.*release/release/p' || echo 'not there')"
if [[ -z $torch ]]; then
  note FAILED machine "$python has no torch"
  finish
fi
for package in pytest hypothesis; do
  if ! ask "import $package"; then note FAILED machine "$python has no $package"; fi
done
capability=""
if [[ $device == cuda ]]; then
  capability=$(ask 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || capability=""
  if [[ -z $capability ]]; then note FAILED machine "torch sees no CUDA device"; fi
fi
((failed)) && finish

# --- the library --------------------------------------------------------------------------------------------------------------
if [[ -z $ops ]]; then
  missing=()
  if [[ $device == cuda ]] && ! "${nvcc:-nvcc}" --version 2>/dev/null | grep -qE 'release (1[2-9]|[2-9][0-9])\.'; then
    missing+=("nvcc >= 12.0 (set CUDACXX)")
  fi
  cmake --version 2>/dev/null | awk 'NR == 1 {split($3, v, "."); exit !(v[1] > 3 || v[2] >= 26)}' || missing+=("cmake >= 3.26")
  command -v ninja >/dev/null || missing+=(ninja)
  ask 'import pybind11; assert pybind11.version_info >= (3, 0)' || missing+=("pybind11 >= 3.0 in $python")
  ask 'import sysconfig, pathlib; assert (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file()' ||
    missing+=("Python.h (python3-dev)")
  # Debian's libxxhash-dev, a folder that is named, or the copy that pyarrow carries.
  xxhash=""
  pyarrow=$(ask 'import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec("pyarrow").origin).parent)')
  for folder in "${HETKV_XXHASH_INCLUDE_DIR:-}" /usr/include /usr/local/include "$pyarrow/include/arrow/vendored/xxhash"; do
    if [[ -z $xxhash && -n $folder && -f $folder/xxhash.h ]]; then xxhash=$folder; fi
  done
  [[ -n $xxhash ]] || missing+=("xxhash.h (libxxhash-dev, or HETKV_XXHASH_INCLUDE_DIR)")
  if ((${#missing[@]} > 0)); then
    printf -v list '%s; ' "${missing[@]}"
    note FAILED build "missing: ${list}or give a library built elsewhere with --ops"
    finish
  fi
  cuda=(-DHETKV_CUDA=OFF)
  if [[ $device == cuda ]]; then
    cuda=(-DHETKV_CUDA=ON "-DHETKV_CUDA_ARCHITECTURES=$capability-real" "-DCMAKE_CUDA_COMPILER=$nvcc")
  fi
  part configure 60 configure.log cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHETKV_PYTHON=ON -DHETKV_TESTS=OFF \
    "${cuda[@]}" "-DPython_EXECUTABLE=$(command -v "$python")" "-DHETKV_XXHASH_INCLUDE_DIR=$xxhash" || finish
  part build 200 build.log cmake --build "$build" --target hetkv_ops -j "$(nproc)" || finish
  ops=$build/csrc/ops/_ops.so
fi

rm -rf "$build/python"
mkdir -p "$build/python/hetkv"
ln -s "$PWD/python/hetkv/ops" "$build/python/hetkv/ops"
ln -s "$(realpath "$ops")" "$build/python/hetkv/_ops.so"
echo '"""The ops alone, for bench/gpu_check.sh."""' >"$build/python/hetkv/__init__.py"
# An installed hetkv, editable ones included, must not be found instead.
printf '%s\n' 'import sys' 'sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]' \
  >"$build/python/sitecustomize.py"
export PYTHONPATH=$build/python:$PWD/tests/python PYTHONUNBUFFERED=1 HETKV_TEST_DEVICE=$device
part load 60 load.log "$python" -c '
import torch, on_device, hetkv.ops
from hetkv.ops import _library
lacking = [op for op in on_device.OPS if not on_device.has_kernel(op)]
print("library  ", _library.ops_path())
print("kernels  ", ", ".join(op for op in on_device.OPS if op not in lacking))
print("no CUDA kernel:", ", ".join(lacking) or "-")
x = torch.zeros(1024, dtype=torch.uint8, device=on_device.DEVICE)
print("checksum ", hetkv.ops.checksum_blocks(x, torch.zeros(1, dtype=torch.int32, device=x.device), block_bytes=1024).item())
' || finish
lacking=$(sed -n 's/^no CUDA kernel: //p' "$out/load.log")
if [[ -n $lacking && $lacking != - ]]; then note - kernels "no CUDA kernel: $lacking"; fi

# --- tests --------------------------------------------------------------------------------------------------------------------
# --noconftest: the fixtures there are the allocator's. A hang ends with the part; pytest-timeout may not be here.
pytest=("$python" -m pytest --noconftest -q -p no:cacheprovider -W default -o timeout=0 -r fE --maxfail 30)
ask 'import pytest_timeout' || pytest+=(-o "addopts=--import-mode=importlib" -W "ignore::pytest.PytestConfigWarning")
tests=tests/python
part graphs 60 graphs.log "${pytest[@]}" "$tests/test_ops_cuda.py" -k "captured or stream"
part shapes 90 shapes.log "${pytest[@]}" "$tests/test_ops_cuda.py" -k "not captured and not stream"

# --- speed --------------------------------------------------------------------------------------------------------------------
small=()
if [[ $device == cpu ]]; then small=(--smallest); fi
budget=$(($(left) - 10))
if ((budget > 60)); then budget=60; fi
part speed 90 speed.log "$python" bench/bench_ops_cuda.py --device "$device" --seconds "$budget" --json "$out/ops_cuda.json" \
  ${small[@]+"${small[@]}"}

# --- the other tests of the ops, on the device --------------------------------------------------------------------------------
part rows 60 rows.log "${pytest[@]}" "$tests/test_ops_row_copy.py" "$tests/test_ops_row_copy_contract.py"
part reference 120 reference.log "${pytest[@]}" -p on_device "$tests"/test_ops_{blocks,write,compress,paged_attention,sparse,block_sparse,minimax_m3}.py

# --- compute-sanitizer --------------------------------------------------------------------------------------------------------
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
if [[ $device != cuda ]]; then
  note - sanitizer "not on the CPU"
elif [[ -z $sanitizer ]]; then
  note - sanitizer "compute-sanitizer is not there"
elif ! timeout 60 "$sanitizer" --error-exitcode 9 "$python" -c 'import torch; torch.ones(8, device="cuda").sum().item()' \
  >"$out/sanitizer.log" 2>&1; then
  note - sanitizer "compute-sanitizer does not work on this machine: $(grep -m1 -iE 'error|not supported' "$out/sanitizer.log")"
else
  # Of hetkv's kernels only. Without torch's cache every tensor is an allocation of its own, so that a byte behind it is a fault;
  # a capture cannot allocate so, and the tests call the ops outside of graphs then.
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
  for tool in memcheck racecheck synccheck; do
    part "$tool" 60 "$tool.log" "$sanitizer" --tool "$tool" --error-exitcode 9 --kernel-name kns=hetkv --report-api-errors no \
      --print-limit 20 "${pytest[@]}" "$tests/test_ops_cuda.py" -k captured
  done
fi
finish
