# Two commands on a fresh machine: `make serve` runs Remat, `make test` tests it. Both need python >= 3.11 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve test quick check bench format

install: $(STAMP)

# The stamp is older than its inputs when .venv is stale, and missing when .venv is.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

serve: install
	$(BIN)/remat serve

test: install
	$(BIN)/pytest

quick: install
	$(BIN)/pytest -m "not slow"

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks
