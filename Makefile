# `make demo` and `make test` do everything on a fresh machine, set-up included.
#   PYTHON  interpreter that makes the environment (3.11 or newer)
#   VENV    where the environment lies
#   NANORL_TORCH  torch requirement instead of the automatic choice, for example "torch==2.12.0"

PYTHON ?=
VENV ?= .venv
BIN := $(VENV)/bin
export PYTHON

.PHONY: demo test test-sglang check lint lint-format lint-code lint-imports lint-types format setup setup-dev clean
.NOTPARALLEL:

demo: setup  ## the closed loop: the tiny model learns arithmetic
	@$(BIN)/nanorl train --steps 6

test: setup-dev  ## all tests that this machine can run, with the coverage floor
	@$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

test-sglang: setup-dev  ## the tests against a real SGLang, which runs without a GPU too (Linux, x86-64)
	@tools/sglang_cpu.sh install
	@$(BIN)/python -m tests.tiny_models .sglang-model
	@tools/sglang_cpu.sh with "$$PWD/.sglang-model" $(BIN)/python -m pytest -m sglang

check: lint test  ## what CI runs

lint: setup-dev  ## the checks that run no test; all of them, whichever fails
	@$(MAKE) --no-print-directory --keep-going lint-format lint-code lint-imports lint-types

lint-format:
	$(BIN)/python -m ruff format --check --output-format concise .

lint-code:
	$(BIN)/python -m ruff check .

lint-imports:
	$(BIN)/lint-imports --no-logo

lint-types:
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

format: setup-dev  ## mends what can be mended
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

setup:
	@tools/setup.sh $(VENV)

setup-dev:
	@tools/setup.sh $(VENV) dev

clean:  ## removes the environment and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .coverage .coverage.* htmlcov build dist .sglang-model
	find nanorl tests -name __pycache__ -type d -prune -exec rm -rf {} +
