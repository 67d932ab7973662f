# Two commands on a fresh machine: `make demo` and `make test`. Both create .venv and install what they need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TOOLS := $(VENV)/installed-dev
KERNELS := $(VENV)/installed-triton
# A package index that serves builds of torch without CUDA. Empty: torch with CUDA, 2.7 GB, from pip's index.
TORCH_INDEX ?=
PIP_INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt \
    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo test ci check full tests costs lint types size docs pages installs gpu notebooks benchmark clean

# Four local processes. torchrun would set OMP_NUM_THREADS itself, with a warning.
LAUNCH := OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4
DEMO := runs/demo
# Tests start hundreds of interpreters, so their bytecode is kept also where the environment says no.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto

demo: $(INSTALLED)  ## simulate the published straggler experiment; run a plan on 4 processes beside its simulation
	$(BIN)/simdist compare experiments/hsgd_stragglers/64.yaml
	$(BIN)/python experiments/hsgd_stragglers/run.py
	rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/simdist plan experiments/demo/scenario.yaml -o $(DEMO)/plans > $(DEMO)/plans.txt
	$(LAUNCH) -m real.calibrate -o $(DEMO)/cluster.yaml --ops all_reduce --budget "4 s"
	$(LAUNCH) -m real $(DEMO)/plans
	$(BIN)/simdist validate $(DEMO)/plans --cluster $(DEMO)/cluster.yaml

check: $(KERNELS) lint  ## while editing: the tests that cost least. tests/tiers.py says which
	@$(PYTEST) --tier check

test: $(KERNELS) lint  ## before a commit: the tests that cost little, and one of each dearer kind
	@$(PYTEST) --tier test

ci: $(KERNELS)  ## all that .ci/run checks: `make test`, types, and every test but those marked `full`
	@$(MAKE) --no-print-directory --jobs=2 lint types tests

full: $(KERNELS) lint types  ## before a release: every test
	@$(PYTEST) --tier full

tests: $(KERNELS)
	@$(PYTEST) --tier ci

costs: $(KERNELS)  ## measure the CPU seconds of each test, by which the tiers choose
	@for tier in ci test check; do $(PYTEST) --tier $$tier --costs tests/costs.json || exit 1; done

lint: $(TOOLS) $(KERNELS)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(TOOLS)
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini

size:  ## files, statements and public names by package
	@$(PYTHON) tools/size.py

installs:  ## resolve what users install, on every claimed Python, from the package index alone
	$(PYTHON) tools/installs.py

gpu:  ## on a machine with a GPU: does all work, and how true is it? Eight minutes; installs nothing, needs no network
	$(PYTHON) tools/gpu.py -o experiments/gpu/results

docs: $(TOOLS)  ## the documentation as a site, build/docs/index.html
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs

# Experiments that compute all that their pages show, and those that also measure: these print what was recorded.
COMPUTED := aws_p3_scaling backup_workers checkpoint_stalls datacache dawnbench_resnet50 efs_k80 garbage_collection gtopk_1gbe hitopk_communication \
	horovod_scaling hsgd_stragglers mitigations mlperf_storage nccl_tables netai_whatif one_machine published_goodput published_sharding streaming_diloco
RECORDED := emulated_cluster failures fault_injections profile_round_trip time_to_accuracy

pages: $(KERNELS)  ## write the numbers and outputs on all pages again; takes minutes
	@set -e; for each in $(COMPUTED); do echo $$each; $(BIN)/python experiments/$$each/run.py --write > /dev/null; done
	@set -e; for each in $(RECORDED); do echo $$each; $(BIN)/python experiments/$$each/run.py --tables --write > /dev/null; done
	$(BIN)/python tools/tables.py
	$(BIN)/python tools/dictionary.py
	PYTHONPATH=tests $(BIN)/python tests/project/test_docs.py

notebooks: $(TOOLS)  ## execute the sources of all notebooks and write them with their figures
	$(BIN)/python tools/notebooks.py

benchmark: $(TOOLS)  ## speed of engines, sweeps and reports, and of training loops with simdist; takes fifteen minutes
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/network.py
	$(BIN)/python benchmarks/expansion.py
	$(BIN)/python benchmarks/topk.py
	$(BIN)/python benchmarks/readers.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/sweep.py
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/questions.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/overhead.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 benchmarks/watch.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "simdist needs Python 3.11 or newer; set PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP_INSTALL) --editable '.[fast,figures,real,tables]'
	touch $@

# What only developers need, so that the demo is there sooner.
$(TOOLS): $(INSTALLED)
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

# Large, and only for tests of kernels.
$(KERNELS): $(TOOLS)
	$(PIP_INSTALL) --editable '.[triton]'
	touch $@
