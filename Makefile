# make demo        install, serve a small model, talk to it, load it, print a table
# make bench-demo  serve a small model and measure it under small workloads, kept in bench-demo/
# make test        lines per package, linters, tests
# make accuracy    270 questions to models/recall-rope, against the answers kept (3 minutes at most)
# make serve       serve MODEL on http://127.0.0.1:8000 until Ctrl-C
# make test-slow   tests that take minutes
# make lint        the linters alone
# make reference   write docs/reference/ from the code
# make clean       remove the environment and what tools left behind
#
# Variables: PYTHON (3.11 or newer), VENV, PIP_ARGS (such as another package index), MODEL, WORKERS
# (processes of tests), and ARGS (flags of the demo, of `baton serve` or of pytest).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
PIP_ARGS ?=
MODEL ?= smollm2-135m
WORKERS ?= 2
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo bench-demo serve accuracy test test-slow lint lines reference clean

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

#: the stamp makes this incremental: it runs again only when what is installed may have changed.
#: On a terminal pip shows its progress bars; torch alone is hundreds of megabytes.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=..." >&2; exit 1; }
	@echo "Installing into $(VENV): a few minutes the first time, nothing after that."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $$(test -t 2 || echo --quiet) --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m baton.bench.demo --model $(MODEL) $(ARGS)

bench-demo: $(STAMP)
	rm -rf bench-demo
	$(BIN)/python -m baton.bench.demo --model $(MODEL) --bench bench-demo $(ARGS)

serve: $(STAMP)
	$(BIN)/baton serve $(MODEL) $(ARGS)

lines: $(STAMP)
	@$(BIN)/python tools/lines.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/reference.py --check

reference: $(STAMP)
	$(BIN)/python tools/reference.py

accuracy: $(STAMP)
	$(BIN)/baton eval compare benchmarks/accuracy/recall-rope.json models/recall-rope \
		--lengths 2K,4K,8K --contexts 1 --queries 6 --chunk 512 --text LICENSE --text-tokens 8192 \
		--gate benchmarks/accuracy/gate.toml $(ARGS)

test: lines lint
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n $(WORKERS) --dist loadfile $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

clean:
	rm -rf $(VENV) build dist bench-demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
