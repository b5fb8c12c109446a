# hetkv. `make demo` and `make test` set everything up on first use; see tools/bootstrap.py.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test bench cuda-all format clean

PYTHON ?= python3
BIN := .venv/bin
JOBS ?= $(shell nproc)
# cmake and ninja of .venv
WITH_TOOLS := PATH="$(CURDIR)/$(BIN):$$PATH"

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: ## set everything up and run the main job (ARGS="--turns 8" passes options)
	@$(PYTHON) tools/bootstrap.py demo
	@$(BIN)/hetkv demo $(ARGS)

test: ## set everything up and run all tests, C++ and Python
	@$(PYTHON) tools/bootstrap.py test
	@$(WITH_TOOLS) cmake --preset dev -DHETKV_CUDA=OFF >.stamps/dev.log || { cat .stamps/dev.log; exit 1; }
	@$(WITH_TOOLS) cmake --build --preset dev -j $(JOBS)
	@$(WITH_TOOLS) ctest --preset dev -j $(JOBS) | tee .stamps/ctest.log
	@$(BIN)/python -m pytest $(ARGS) | tee .stamps/pytest.log

bench: ## build the C++ benchmark and run it (ARGS= passes options)
	@$(PYTHON) tools/bootstrap.py bench
	@$(WITH_TOOLS) cmake --preset bench >.stamps/bench.log || { cat .stamps/bench.log; exit 1; }
	@$(WITH_TOOLS) cmake --build --preset bench -j $(JOBS)
	@build/bench/bench/cpp/hetkv_bench $(ARGS)

cuda-all: ## compile the CUDA kernels for every architecture that this nvcc knows
	@$(PYTHON) tools/bootstrap.py demo
	@$(WITH_TOOLS) cmake --preset cuda -DHETKV_CUDA_ARCHITECTURES=all -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python
	@$(WITH_TOOLS) cmake --build --preset cuda -j $(JOBS)

format: ## format C++ and Python
	@$(PYTHON) tools/bootstrap.py ci
	@git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs $(BIN)/clang-format -i
	@$(BIN)/ruff format -q . && $(BIN)/ruff check -q --fix .

clean: ## remove all that was built, with .venv
	rm -rf build .venv .stamps .cache dist
