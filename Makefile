# Every target sets up what it needs on a fresh Debian or Ubuntu machine, and no more: `make demo` the runtime alone, `make test`
# the tools and servers that tests use, `make check` and `make train` torch too.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# The first Python that really runs and is new enough: a version manager's shim may exist for one that is not installed.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 /usr/bin/python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && command -v $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNTIME := $(VENV)/.runtime
TOOLS := $(VENV)/.tools
TORCH := $(VENV)/.torch
export ROLLYARD_CACHE ?= $(HOME)/.cache/rollyard
# The suite starts `rollyard` hundreds of times: without compiled modules each start costs twice its CPU.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup system torch demo test test-slow attack portability mutants check docs format drills bench docker docker-stop train vllm

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(TOOLS)  ## what tests need, into .venv: tools, real clients, the extras

$(RUNTIME): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; install one, or say make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || PYTHON="$(PYTHON)" bash .ci/system-packages runtime
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

$(TOOLS): $(RUNTIME) requirements-dev.txt | system
	$(PIP) -r requirements-dev.txt
	$(PIP) --no-build-isolation --editable '.[docker,mcp,postgres,ray,redis,parquet,tokens,tui,report]'
	touch $@

$(TORCH): $(TOOLS)
	$(PIP) torch
	touch $@

system:  ## Debian packages that tests use (with root and apt; otherwise it says what is skipped)
	@PYTHON="$(PYTHON)" bash .ci/system-packages tests

torch: $(TORCH)  ## torch, for the tests of the trainer; where your index offers CUDA builds first, name a CPU index to pip

demo: $(RUNTIME)  ## the shortest look at what it does; installs the runtime and one agent
	$(BIN)/rollyard demo --agent $(or $(AGENT),pi) $(if $(BASE_URL),--base-url $(BASE_URL)) $(if $(MODEL),--model $(MODEL))

# A test that fails while three run at once on a loaded machine gets a second try, alone, and both results are printed.
PYTEST := $(BIN)/python -m pytest -m "not slow" --timeout 300 --hypothesis-profile ci
test: setup  ## the ordinary suite: minutes on two cores; without torch (make torch) its tests say that they are skipped
	$(PYTEST) -n 3 --dist loadgroup || { echo "These failed while others ran. They run once more, alone:"; \
		$(PYTEST) --last-failed --last-failed-no-failures none; }

vllm: setup  ## a real vLLM on the CPU (3.5 GB, once) for tests/policy/test_vllm.py
	$(BIN)/python -m tests.servers.vllm

test-slow: torch  ## soaks, churn, long waits, engines, foreign venvs, training
	-@bash .ci/engine-packages docker && bash .ci/engine-packages podman
	$(BIN)/python -m pytest -m slow

attack: setup  ## every attack that is tried, and a table of parties, attempts and successes; ARGS=tests/gate for some of them
	$(BIN)/python tests/attack.py -n 2 --dist loadgroup --timeout 600 $(ARGS)

portability: setup  ## machines made here, and what the local backend reaches and refuses on each; needs root
	$(BIN)/python tests/portability.py

check: torch docs  ## formatting, lint, types (torch's too; calls of the benchmarks), layers, the documents as a site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright -p bench --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: setup  ## the documents and the reference of Python as a site in out/site; a link or a name that leads nowhere fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: setup  ## rewrite files the way `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: setup  ## break the code of each law on purpose, in a copy, and see its tests fail; WORD=leases for some of them
	$(BIN)/python tests/mutants.py $(WORD)

train: torch  ## GRPO on real rollouts; SEEDS=5 for five curves
	$(BIN)/python examples/grpo/train.py --seeds $(or $(SEEDS),1) --out out/grpo

drills: setup  ## a Ray cluster and two control planes, broken on purpose; SIZE=500 attempts a run, SEED=1, ARGS=--missing
	$(BIN)/python -m bench.drills --size $(or $(SIZE),500) --seed $(or $(SEED),1) --out docs/drills.md $(ARGS)

bench: setup  ## every budget in one table, with the ratio to the last recorded run
	$(BIN)/python -m bench

ENGINE ?= docker
docker: setup  ## a throw-away Docker engine (ENGINE=podman: Podman) with an image; prints its address
	@bash .ci/engine-packages $(ENGINE)
	@$(BIN)/python -m tests.servers.engines start $(ENGINE)

docker-stop:  ## end it and leave nothing behind
	@$(BIN)/python -m tests.servers.engines stop $(ENGINE)
