# Every target sets up what it needs on a fresh Debian or Ubuntu machine. `make demo` and `make test` are the two commands.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export ROLLYARD_CACHE ?= $(HOME)/.cache/rollyard

.PHONY: help setup system demo test test-slow check format bench

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

setup: $(STAMP) system  ## everything the other targets need, into .venv

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation --editable '.[docker,postgres,redis,parquet,tokens,tui,report]'
	touch $@

system:  ## Debian packages that some tests need (with root and apt; otherwise those tests say that they are skipped)
	@bash .ci/system-packages

demo: setup  ## the shortest look at what it does
	$(BIN)/python examples/demo.py

test: setup  ## the ordinary suite: minutes on two cores
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadgroup

test-slow: setup  ## soaks, churn, long waits, engines, foreign venvs, training
	$(BIN)/python -m pytest -m slow

check: setup  ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: setup  ## rewrite files the way `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## ratios measured in one run; see bench/
	$(BIN)/python -m bench
