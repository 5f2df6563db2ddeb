# Everything a checkout can do. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SECONDEXPANSION:
.PHONY: help install run test coverage test-gpu lint lock clean

VENV := .venv
UV := $(shell command -v uv)
IN_RANGE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

# Many tests wait for processes of their own: one more at a time than there are cores keeps these busy.
TEST_PROCESSES ?= $(shell echo $$(($$(nproc) < 4 ? $$(nproc) + 1 : 4)))
# Kernels are compiled on the host: several processes share the GPU, some 8 GB each.
GPU_TEST_PROCESSES ?= $(shell echo $$(($$(nproc) < 16 ? $$(nproc) : 15)))

# These three are looked up only when a recipe needs them.
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c '$(IN_RANGE)' 2>/dev/null && echo $$python && break; done)
CUDA ?= $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU' && echo 1)
LOCK ?= $(if $(filter 1,$(CUDA)),requirements-cuda,requirements)

ifneq ($(UV),)
PIP_INSTALL = uv pip install --quiet --python $(VENV)/bin/python
else
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
endif

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 18

install: $(VENV)/$$(LOCK).stamp $(VENV)/quire.stamp ## make .venv with the quire command (CUDA=1 or a visible GPU adds CUDA)
	@:

run: install ## install, then serve on http://127.0.0.1:8000 (ARGS="--model DIR --port 9000" are passed on)
	@exec $(VENV)/bin/quire serve $(ARGS)

test: install $(VENV)/requirements-test.stamp ## install, then every test (what needs a GPU is skipped by name)
	@OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: ARGS += --cov=service --cov=model --cov-report=term:skip-covered
coverage: test ## the same with line coverage, half as fast

test-gpu: $(if $(PYTHON_BIN),,gpu-env) ## each kernel against its NumPy reference (PYTHON_BIN=python3 uses that Python as it is)
	@$(or $(PYTHON_BIN),$(VENV)/bin/python) -m pytest tests/kernel -m 'gpu and not whole_gpu' -n $(GPU_TEST_PROCESSES) $(ARGS)
	@$(or $(PYTHON_BIN),$(VENV)/bin/python) -m pytest tests/kernel -m 'gpu and whole_gpu' $(ARGS)

.PHONY: gpu-env
gpu-env: $(VENV)/requirements-cuda.stamp $(VENV)/requirements-test.stamp $(VENV)/quire.stamp

.PHONY: test-chaos
test-chaos: install $(VENV)/requirements-test.stamp ## kill, stop, starve and poison everything under load, and check every answer (CHAOS_JOBS=10000)
	@CHAOS_JOBS=$(or $(CHAOS_JOBS),1000) $(VENV)/bin/python -m pytest tests/chaos -m 'chaos or not chaos' $(ARGS)

lint: install $(VENV)/requirements-test.stamp ## ruff check, ruff format --check, mypy --strict on service and model
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/python -m mypy

lock: ## resolve the newest allowed versions again and write the requirements files (needs uv)
	@all=$$(mktemp); trap 'rm -f "$$all"' EXIT; \
	lock() { echo 'setuptools>=77' | uv pip compile pyproject.toml - --universal --python-version 3.11 \
		--fork-strategy fewest --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet "$$@"; }; \
	lock --extra cuda --extra test --extra compile --extra plot --extra otel -o "$$all"; \
	lock --constraint "$$all" -o requirements.txt; \
	lock --constraint "$$all" --extra cuda -o requirements-cuda.txt; \
	lock --constraint "$$all" --extra test --extra compile --extra plot --extra otel -o requirements-test.txt

clean: ## remove .venv and what tools left behind
	@rm -rf $(VENV) *.egg-info build dist .coverage .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	@python="$(PYTHON)"; \
	if [[ -n "$$python" ]] && ! "$$python" -c '$(IN_RANGE)' 2>/dev/null; then \
		echo "make: $$python is not a Python from 3.11 to 3.13" >&2; exit 1; fi; \
	rm -rf $(VENV); \
	if [[ -n "$(UV)" ]]; then exec uv venv --quiet --seed --python "$${python:->=3.11,<3.14}" $(VENV); fi; \
	if [[ -z "$$python" ]]; then \
		echo "make: no Python from 3.11 to 3.13 found; install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "make: $$python cannot make virtual environments; on Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; fi; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/%.stamp: %.txt $(VENV)/pyvenv.cfg
	@echo "installing $<"
	@$(PIP_INSTALL) --require-hashes --no-deps -r $<
	@touch $@

$(VENV)/quire.stamp: pyproject.toml $(VENV)/pyvenv.cfg | $(VENV)/$$(LOCK).stamp
	@PYTHONWARNINGS=ignore $(PIP_INSTALL) --no-deps --no-build-isolation --editable .  # setuptools warns of any editable install
	@touch $@
