# SPDX-License-Identifier: Apache-2.0
# Two commands for a fresh machine with Python >= 3.10, a C++ compiler and pip:  make demo   make test
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find cpp python third_party -name '*.so' -prune -o -type f -print 2>/dev/null | grep -v __pycache__) CMakeLists.txt pyproject.toml

.PHONY: demo test pytest ctest ctest-cuda mutants lint format clean

demo: $(VENV)/.demo
	$(BIN)/rooftile demo

test: pytest ctest

pytest: $(VENV)/.test
	$(BIN)/python -m pytest

# C++ tests, where GoogleTest is found (Debian: apt-get install libgtest-dev)
ctest: $(VENV)/.test
	$(BIN)/cmake --preset cpu -DPython_EXECUTABLE=$(abspath $(BIN)/python)
	$(BIN)/cmake --build --preset cpu
	$(BIN)/ctest --preset cpu

# The same with the GPU kernels and their checks; needs nvcc, and skips what needs a GPU where there is none
ctest-cuda: $(VENV)/.test
	$(BIN)/cmake --preset cuda -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build --preset cuda
	$(BIN)/ctest --preset cuda

# Whether the tests see faults: plants them, builds once, runs the tests that reach each (docs/contributing.md)
mutants: $(VENV)/.test
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python tests/mutants run --record

lint: $(VENV)/.test
	$(BIN)/python -m pip install -q --disable-pip-version-check ruff codespell
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/codespell cpp python tests docs README.md

format: $(VENV)/.test
	$(BIN)/python -m pip install -q --disable-pip-version-check ruff
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

# ---- set-up: one virtual environment, torch pinned, then rooftile built from this tree ----
$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	touch $@

$(VENV)/.demo: $(VENV)/.venv $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)" ".[demo]"
	touch $@

$(VENV)/.test: $(VENV)/.venv $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)" ".[test]" "cmake>=3.30" ninja "nanobind>=3.1"
	touch $@ $(VENV)/.demo

clean:
	rm -rf build $(VENV) python/rooftile/*.so
