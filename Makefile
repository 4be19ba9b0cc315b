# make demo        install, serve a small model, talk to it, load it, print a table
# make test        lines per package, linters, tests
# Variables: PYTHON (3.11 or newer), VENV, PIP_ARGS (such as another package index), MODEL, ARGS.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
PIP_ARGS ?=
MODEL ?= smollm2-135m
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo serve test test-slow lint lines clean

help:
	@sed -n 's/^# //p' Makefile

#: the stamp makes this incremental: it runs again only when what is installed may have changed.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time, nothing after that."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m baton.bench.demo --model $(MODEL) $(ARGS)

serve: $(STAMP)
	$(BIN)/baton serve $(MODEL) $(ARGS)

lines: $(STAMP)
	@$(BIN)/python tools/lines.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

test: lines lint
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
