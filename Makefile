PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
PEERS := .venv-peers
PIP := -m pip install --quiet

.PHONY: demo test lint format docs chaos fuzz drills bench gpu bench-check clean

demo: $(INSTALLED)  ## train, kill, resume, compare, export: the whole system in minutes
	$(VENV)/bin/keepstep demo

test: $(INSTALLED)  ## every test that is not marked slow or gpu, with the coverage of the test process
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow and not gpu" -n 2 --dist loadfile --cov --cov-report=

lint: $(INSTALLED)  ## style, types, shell scripts, the Dockerfile
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/shellcheck .ci/run slurm/*.sbatch
	$(VENV)/bin/hadolint slurm/Dockerfile

format: $(INSTALLED)  ## fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(INSTALLED)  ## the documentation site, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

chaos: $(INSTALLED)  ## 200 random faults from a seed (KEEPSTEP_CHAOS_SEED)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -s --timeout 0 tests/chaos

fuzz: $(INSTALLED)  ## mutated files of every format that is read (KEEPSTEP_FUZZ_INPUTS, 20,000)
	OMP_NUM_THREADS=1 $(PY) -m tests.hostile.fuzz --inputs $(or $(KEEPSTEP_FUZZ_INPUTS),20000)

drills: $(INSTALLED)  ## every drill on a real Slurm cluster; needs root and Slurm's packages
	OMP_NUM_THREADS=1 $(PY) -m tests.slurm.drills
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -s --timeout 0 tests/slurm -k "fewer_nodes or proves_itself"

bench: $(INSTALLED) $(PEERS)/.installed  ## all benchmarks, side by side with others, into docs/benchmarks.md
	$(PY) -m bench --peers $(PEERS)/bin/python --out docs/benchmarks.md

gpu:  ## the tests marked gpu, then bench/gpu.py, into build/gpu.txt; with the machine's own Python and torch (PYTHON=...)
	$(PYTHON) -m bench.gpu_node --out build/gpu.txt

bench-check: $(INSTALLED)  ## ratios against the recorded ones
	$(PY) -m bench.check

clean:  ## remove the environments and everything that was built
	rm -rf $(VENV) $(PEERS) build *.egg-info

# torch first and alone, pinned: a looser request would fetch a build for GPUs of several gigabytes.
$(INSTALLED): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) $(PIP) --constraint .ci/constraints.txt torch setuptools wheel ninja
	$(PY) $(PIP) --constraint .ci/constraints.txt --no-build-isolation --editable ".[dev,docs,s3,tiktoken,fp8,wandb,mlflow,plots,lm-eval,serve]"
	touch $@

$(PEERS)/.installed: .ci/constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python $(PIP) --constraint .ci/constraints.txt torch setuptools wheel ninja numpy
	$(PEERS)/bin/python $(PIP) --constraint .ci/constraints.txt --no-build-isolation deepspeed pydantic xxhash zstandard \
	  sentencepiece tiktoken tokenizers psutil pyyaml fsspec aiohttp
	$(PEERS)/bin/python $(PIP) torch==2.13.0 litgpt transformers accelerate datasets litdata mosaicml-streaming
	$(PEERS)/bin/python -m pip uninstall --quiet --yes torchvision  # built for torch with CUDA; what finds it imports it
	touch $@
