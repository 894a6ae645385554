PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format chaos drills bench clean

demo: $(INSTALLED)  ## train, kill, resume, compare, export: the whole system in minutes
	$(VENV)/bin/keepstep demo

test: $(INSTALLED)  ## every test that is not marked slow or gpu
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not gpu"

chaos: $(INSTALLED)  ## 200 random faults from a seed, in about 20 minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow tests/chaos

lint: $(INSTALLED)  ## style, types, shell scripts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/shellcheck .ci/run slurm/*.sbatch

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

# torch first and alone, pinned: a looser request would fetch a build for GPUs of several gigabytes.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint .ci/constraints.txt torch setuptools wheel ninja
	$(PY) -m pip install --quiet --constraint .ci/constraints.txt --no-build-isolation --editable ".[dev,s3,tiktoken]"
	touch $@
