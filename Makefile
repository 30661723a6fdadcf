# Everything needs only Python 3.10+ and make; .venv is made on first use.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
WORKERS ?= auto
TESTS   ?= tests

.DEFAULT_GOAL := help
.PHONY: help venv demo demo-flask demo-fastapi test check lint types format docs bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	@touch $@

venv: $(VENV)/.ready ## make .venv with all that development needs

demo: venv ## five processes elect a leader; a frozen one is fenced off
	$(BIN)/python -m sample_projects.demo

demo-flask: venv ## a Flask report that cron starts on two machines; a frozen one is refused
	$(BIN)/python -m sample_projects.flask_demo

demo-fastapi: venv ## three uvicorn workers, one queue consumer; it is killed, another takes over
	$(BIN)/python -m sample_projects.fastapi_demo

test: venv ## all tests
	$(BIN)/python -m pytest -n $(WORKERS) -q $(TESTS)

lint: venv ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## strict types
	$(BIN)/mypy

format: venv ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint types test ## lint, types and tests

docs: venv ## build the documentation; every warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build

bench: venv ## speed, as ratios measured in one run
	$(BIN)/python -m benchmarks

clean: ## remove what make made
	rm -rf .venv .venv-* docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .demo
