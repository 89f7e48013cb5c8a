# SPDX-License-Identifier: Apache-2.0
# Two commands for a fresh machine with Python >= 3.10, a C++ compiler and pip:  make demo   make test
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# Versions of what tests and checks need, for the same result tomorrow; empty: the newest
CONSTRAINTS ?= -c tests/constraints.txt
SOURCES := $(shell find cpp python third_party -name '*.so' -prune -o -type f -print 2>/dev/null | grep -v __pycache__) CMakeLists.txt CMakePresets.json pyproject.toml
CPP := $(shell find cpp python/src tests/cpp bench -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
CLANG_FORMAT ?= clang-format==23.1.5

.PHONY: demo test test-all test-slow pytest ctest ctest-cuda mutants lint format clean

# Options of `rooftile demo`: make demo DEMO=--quick
DEMO ?=
demo: $(VENV)/.demo
	$(BIN)/rooftile demo $(DEMO)

test: pytest ctest

# With the tests that take long or much memory (marker `slow`)
test-all: test test-slow

# One process a core; what worksteal gives a process stays together by file
pytest: $(VENV)/.test
	$(BIN)/python -m pytest -m "not slow" -n logical --dist worksteal

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow -n logical --dist worksteal

# C++ tests; says at its end where GoogleTest is missing (Debian: apt-get install libgtest-dev)
ctest: $(VENV)/.test
	tests/cpp/run.sh test

# The same with the GPU kernels of every architecture and their checks; needs nvcc, and skips what needs a GPU where there is none
ctest-cuda: $(VENV)/.test
	tests/cpp/run.sh cuda

# Whether the tests see faults: plants them, builds once, runs the tests that reach each (docs/contributing.md)
mutants: $(VENV)/.test
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tests/mutants run --record

lint: $(VENV)/.pip
	$(PIP) $(CONSTRAINTS) ruff codespell "$(CLANG_FORMAT)"
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell cpp python tests docs README.md
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/.pip
	$(PIP) $(CONSTRAINTS) ruff "$(CLANG_FORMAT)"
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# ---- set-up: one virtual environment, torch pinned, then rooftile built from this tree ----
$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

$(VENV)/.venv: $(VENV)/.pip
	$(PIP) "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.venv $(SOURCES)
	$(PIP) "$(TORCH)" ".[demo]"
	touch $@

# What compiles, and what the tests need beside rooftile
$(VENV)/.build: $(VENV)/.pip pyproject.toml tests/constraints.txt
	$(PIP) $(CONSTRAINTS) --group build
	touch $@

$(VENV)/.packages: $(VENV)/.venv pyproject.toml tests/constraints.txt
	$(PIP) $(CONSTRAINTS) "$(TORCH)" --group test
	touch $@

# The library is compiled once, while pip fetches packages: what the C++ tests link is what is installed
$(VENV)/.test: $(VENV)/.build $(SOURCES)
	$(MAKE) $(VENV)/.packages & packages=$$!; tests/cpp/run.sh test --build && wait $$packages
	$(PIP) $(CONSTRAINTS) "$(TORCH)" --no-build-isolation -C build-dir=build/test ".[demo]"
	touch $@ $(VENV)/.demo

clean:
	rm -rf build $(VENV) python/rooftile/*.so
