# One environment, .venv, built from the lock; every target that needs it makes it first.
# make PYTHON=python3.12 names another interpreter.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Two workers, each with half of the files in their order: what a file makes once is made once.
PYTEST := $(BIN)/python -m pytest -n 2
TESTS := $(PYTEST) --dist worksteal -p no:nbval -p no:anyio tests
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check attnlib tests && $(BIN)/mypy attnlib
# Bytecode is kept, whatever the caller says: each of many processes would compile the package.
export PYTHONDONTWRITEBYTECODE :=
LAB_ROOT := .
LAB_FLAGS :=

.DEFAULT_GOAL := help
.PHONY: help setup report lint quick test gpu notebooks watch lab clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install the pinned packages into it

# The stamp goes first and comes back last: an interrupted install is never taken for a whole one.
$(STAMP): requirements.txt pyproject.toml
	@rm -f $@
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'attnlib needs Python 3.11 or newer: make PYTHON=/path/to/python3' >&2; exit 1; }
	@# One of another Python would keep its libraries.
	@[ "$$($(BIN)/python -VV 2>&1)" = "$$($(PYTHON) -VV)" ] || rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

report: $(STAMP) ## build the HTML report, build/report/index.html
	$(BIN)/python -m attnlib report

lint: $(STAMP) ## ruff and mypy
	$(LINT)

quick: $(STAMP) ## lint, and the tests that are not slow and start no notebook and no browser
	( $(LINT) ) & lint=$$!; \
	$(TESTS) --ignore tests/browser -m "not gpu and not kernel and not slow"; tests=$$?; \
	wait $$lint && exit $$tests

test: lint ## lint, run the tests, then re-run every notebook in replay mode
	$(TESTS)
	PYTHONPATH=tests ATTNLIB_MODE=replay $(PYTEST) --dist loadscope \
	    --nbval --nbval-current-env \
	    --nbval-sanitize-with tests/nbval_sanitize.cfg notebooks

gpu: $(STAMP) ## on a GPU: its tests, and every notebook live; stopped and started again, it goes on
	$(BIN)/python tests/support/live_run.py

notebooks: $(STAMP) ## re-execute the notebooks in place from the records (before a commit)
	ATTNLIB_MODE=replay $(BIN)/python -m attnlib refresh

watch: $(STAMP) ## build/watch.md: what newer releases of other packages change of what was read
	mkdir -p build
	$(BIN)/python -m attnlib watch --badge build/watch.json > build/watch.md

# To this machine only, and with the token that Jupyter makes. Root needs LAB_FLAGS=--allow-root.
lab: $(STAMP) ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.allow_remote_access=False \
	    --ServerApp.root_dir=$(LAB_ROOT) $(LAB_FLAGS) $(LAB_ROOT)/notebooks/01_start.ipynb

clean: ## remove build products and caches; .venv stays
	rm -rf build .pytest_cache .ruff_cache .mypy_cache .hypothesis .coverage *.egg-info
	find attnlib tests notebooks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune \
	    -exec rm -rf {} +
