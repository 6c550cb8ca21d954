# Two commands for a fresh clone: `make demo` and `make test`. They need Python 3.11 or newer with pip, and nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint notebooks docs clean

# Else each of the processes that tests start compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# The first Python on the path that is new enough; override with `make PYTHON=/path/to/python`.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
READY := .venv/.ready

help:  ## List the commands
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

demo: $(READY)  ## Find, apply and check the shardings of two train steps on 8 virtual devices
	.venv/bin/autoshard demo

PYTEST = .venv/bin/python -m pytest -n 2 $(if $(K),-k "$(K)")
SINCE ?= HEAD~1

test: $(READY)  ## Lint, then run a sample of the tests (a pytest -k expression in K selects some)
	.venv/bin/ruff check .
	$(PYTEST) --dist worksteal

test-all: test  ## The same, then all other tests, those of what changed since SINCE first; with MINUTES=30 these end after half an hour
	$(PYTEST) -m slow --maxschedchunk 50 --since $(SINCE) $(if $(MINUTES),--minutes $(MINUTES))

lint: $(READY)  ## Lint and check types
	.venv/bin/ruff check .
	.venv/bin/pyright

notebooks: $(READY)  ## Run the notebooks and keep their outputs
	MPLBACKEND=module://matplotlib_inline.backend_inline .venv/bin/jupyter-execute --inplace --NotebookClient.record_timing=False notebooks/*.ipynb

docs: $(READY)  ## Build the site into build/site
	.venv/bin/sphinx-build -q -W --keep-going -b html docs build/site
	@echo "Open build/site/index.html"

clean:  ## Remove everything that was made here, the environment included
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's python3 has pip but may lack ensurepip: then its own pip fills an environment without one.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "autoshard needs Python 3.11 or newer, and there is none on the path. Install one, or run make PYTHON=/path/to/python."; exit 1; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv >/dev/null 2>&1 || $(PYTHON) -m venv --clear --without-pip .venv
	@echo "Installing autoshard and its tools into .venv; the first time takes a few minutes."
	@if .venv/bin/python -m pip --version >/dev/null 2>&1; then .venv/bin/python -m pip install --quiet --editable '.[dev]'; \
	else $(PYTHON) -m pip --python .venv/bin/python install --quiet --editable '.[dev]'; fi
	@touch $@
