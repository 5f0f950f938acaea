# Commands from a clean clone, given Python 3.10 or newer, make and a C++ compiler:
#
#   make demo        quantize the bundled toy model with a dozen schemes, measure each, and write out/demo/report.html
#   make test        lint, type check and tests, without the slow ones, which it counts
#   make docs        the site, offline: out/site; make docs-serve shows it while it is written
#   make test-all    all of it, which evals/results/test_all.json keeps a record of
#
# PYTHON picks the interpreter that .venv is made from. PIP_FLAGS goes to every pip call: on a machine without a GPU,
# PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" spares the download of torch's CUDA libraries.

PYTHON ?= python3
PIP_FLAGS ?=
JOBS ?= 2
PYTEST_FLAGS ?=
DEMO_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt
SOURCES := $(shell find csrc -type f -not -name '*.pyc' 2>/dev/null)

.PHONY: demo test test-all docs docs-serve lint install clean

demo: install
	$(BIN)/lowbit demo --out out/demo $(DEMO_FLAGS)

# One thread a worker: more would only fight over the cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) $(PYTEST_FLAGS)

test-all: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --slow --record evals/results/test_all.json $(PYTEST_FLAGS)

docs: install
	$(BIN)/mkdocs build

docs-serve: install
	$(BIN)/mkdocs serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(VENV)/.lowbit

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch before lowbit: its extension is built against the torch that is installed, not against a copy of its own.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	$(PIP) torch setuptools ninja
	@touch $@

$(VENV)/.lowbit: $(VENV)/.torch pyproject.toml $(wildcard setup.py) $(SOURCES)
	$(PIP) --no-build-isolation -e '.[dev,models]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find lowbit lowbit_kernels -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
