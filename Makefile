# The daily commands. Everything runs in .venv, which `make env` makes and keeps current.
# Variables: PYTHON (the interpreter to make .venv from), ARGS (passed on to pytest, the demo or the fault
# campaign), SEED (of the fault campaign),
# VERSIONS (of megatron-core, for test-versions), SANITIZERS (for test-native-sanitizers: address, thread,
# undefined).
SHELL := bash
BIN := .venv/bin
SEED := 1
NATIVE_SOURCES = $(shell find cuda tests tools -name '*.cc' -o -name '*.h')

.PHONY: help env demo test test-faults test-versions test-native-sanitizers test-aarch64 lint format clean distclean
.DEFAULT_GOAL := help

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 32

env: ## make or refresh .venv: a few minutes the first time, seconds after
	@tools/env/bootstrap.sh

demo: env ## run recipes/demo.py
	@$(BIN)/python recipes/demo.py $(ARGS)

# Tests that launch several ranks come one at a time: two of those at once on two cores make each other's
# deadlines fail.
test: lint ## run the linters, then all tests (GPU tests where there is a GPU), or those of ARGS
ifeq ($(ARGS),)
	@$(BIN)/python -m pytest -n 2 tests/golden tests/native tests/unit
	@$(BIN)/python -m pytest --ignore tests/golden --ignore tests/native --ignore tests/unit
else
	@$(BIN)/python -m pytest $(ARGS)
endif

# Not part of `test`, which runs a slice of it: this takes hours. See docs/faults.md.
test-faults: env ## run the fault campaign with SEED (1): kills, damage, forgeries; ARGS='--parts damage --rounds 500'
	@$(BIN)/python -m tests.faults.campaign --seed $(SEED) $(ARGS)

# Not part of `test`: it takes some minutes a release. CI runs both.
test-versions: env ## run the tests that meet Megatron against its other releases
	@tools/env/versions.sh $(VERSIONS)

test-native-sanitizers: env ## run tests/native under the sanitizers of g++
	@tools/env/sanitizers.sh $(SANITIZERS)

test-aarch64: env ## build the native core for aarch64 and run its portable tests under qemu
	@tools/env/aarch64.sh

lint: env ## ruff, mypy, import-linter, clang-format
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy

format: env ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

clean: ## remove what builds and tests left, but not .venv
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -f megatron_datastates/engine/_native*.so
	find megatron_datastates recipes tests tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
