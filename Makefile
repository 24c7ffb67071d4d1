# Every target starts from a bare machine: python3 (3.10 or newer) with venv and pip, and nothing else.
#
#   make demo      train a network with stock PyTorch and with convgrad, and compare
#   make check     the core in under a minute: problems, shapes, each backend on a few problems, functions, derivatives
#   make test      the tests that every change must pass
#   make test-all  the slow ones too
#   make lint      format, style and types, as a check; `make format` repairs
#   make bench     what a call costs, and the short benchmark
#   make docs      the documentation, in docs/_build/html

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
# What the installation depends on; the compiled kernels are part of it.
SOURCES := pyproject.toml constraints.txt $(wildcard setup.py MANIFEST.in csrc/* csrc/*/*)
# Many small problems: one thread a process and several processes beat several threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# What `make check` runs.
CORE := tests/test_problem.py tests/test_problem_text.py tests/test_shapes.py tests/check tests/functional tests/nn \
  tests/ops/test_autograd.py tests/backends/test_conformance.py::test_some_of_the_default_problems

.PHONY: demo check test test-all lint format bench docs clean

demo: $(INSTALLED)
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
	$(BIN)/pyright

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)
	$(if $(wildcard benchmarks/cpu.py),$(BIN)/python benchmarks/cpu.py --short $(ARGS))
	$(BIN)/python benchmarks/overhead.py

docs: $(VENV)/.installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

$(INSTALLED): $(SOURCES)
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "convgrad needs Python 3.10 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV); the first time this fetches PyTorch and takes some minutes"
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(INSTALLED)
	$(INSTALL) -e '.[dev,docs]'
	@touch $@

clean:
	rm -rf build dist docs/_build .pytest_cache .ruff_cache .hypothesis
