# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test lint benchmark clean

demo: $(INSTALLED)  ## simulate the published straggler experiment and print its speed-up tables
	$(BIN)/simdist compare experiments/hsgd_stragglers/64.yaml
	$(BIN)/python experiments/hsgd_stragglers/run.py

test: lint  ## everything that .ci/run checks
	$(BIN)/python -m pytest -n auto

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmark: $(INSTALLED)  ## speed of both engines; takes about a minute
	$(BIN)/python benchmarks/engines.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "simdist needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
