# The daily commands. All run in .venv, which `make env` creates and keeps up to date.
# Variables: PYTHON (the interpreter for .venv), ARGS (passed to pytest, the demo or the fault campaign), SEED (of the campaign),
# VERSIONS (releases of megatron-core, for test-versions), CHECKOUT (of Megatron-LM, for test-main), DIR and DIR2 (for test-filesystem),
# SANITIZERS (for test-native-sanitizers: address, thread, undefined).
SHELL := bash
BIN := .venv/bin
SEED := 1
RANK_TESTS := tests/e2e tests/faults tests/model tests/multirank tests/frameworks tests/gpu
NATIVE_SOURCES = $(shell find cuda tests tools -name '*.cc' -o -name '*.h')

.PHONY: help env demo test test-ranks test-long test-faults test-filesystem test-versions test-lowest test-main test-te test-frameworks test-native-sanitizers test-aarch64 lint lint-ruff lint-native lint-locks lint-imports lint-types format clean distclean
.DEFAULT_GOAL := help

help: ## list these targets and variables
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 32
	@sed -n '2,4s/^# //p' $(firstword $(MAKEFILE_LIST))

env: ## create or update .venv: minutes the first time, then seconds
	@tools/env/bootstrap.sh

demo: env ## train, kill, resume and verify on a CPU (recipes/demo.py)
	@$(BIN)/python recipes/demo.py $(ARGS)

# Two tests run at a time: those that launch ranks wait much of their time. Theirs are from different files, as tests of
# one file share runs of a trainer. Of those with several cases only the first is run here; `make test-ranks` runs all.
# Tests marked `long` are in `make test-long`.
test: lint ## run the linters and all tests but long ones (of those with ranks, one case each), or what ARGS selects
ifeq ($(ARGS),)
	@$(BIN)/python -m pytest -n 2 --durations 25 --durations-min 2 -m "not long" tests/golden tests/native tests/unit
	@$(BIN)/python -m pytest -n 2 --durations 25 --durations-min 2 --dist loadfile --no-loadscope-reorder --first-case -m "not long" $(RANK_TESTS)
else
	@$(BIN)/python -m pytest $(ARGS)
endif

test-ranks: env ## run every case of the tests that launch ranks (about 40 minutes on 2 cores)
	@$(BIN)/python -m pytest $(RANK_TESTS) $(ARGS)

# Not part of `test`, which runs a slice of it: this takes hours. See docs/faults.md.
test-faults: env ## run the fault campaign with SEED (1): kills, damage, forgeries; ARGS='--parts damage --rounds 500'
	@$(BIN)/python -m tests.faults.campaign --seed $(SEED) $(ARGS)

# Not part of `test`, whose files are in /tmp. DIR2 is the same directory through another mount, as two nodes have it.
test-filesystem: env ## run the tests that depend most on the file system in DIR, and on a kill through DIR and DIR2
	@tools/env/filesystem.sh $(or $(DIR),$(error DIR=path/in/that/filesystem is needed)) $(DIR2)

# Not part of `test`, because each release takes minutes. CI runs a part of it.
test-versions: env ## run the conformance tests with other releases of Megatron-Core
	@tools/env/versions.sh $(VERSIONS)

# Not part of `test`, because it takes as long as all other tests of one process. CI runs a part of it.
test-lowest: env ## run the tests of one process with the lowest releases of msgspec, numpy and others
	@tools/env/lowest.sh

# Not part of `test`: Transformer Engine has to be built first, which takes half an hour.
test-te: env ## build Transformer Engine and test its layers, extra states and quantized weights on the CPU
	@tools/env/te.sh

# Not part of `test`, which skips those of its tests that need a framework: it installs several.
test-frameworks: env ## run tests/frameworks with released frameworks (Megatron-Bridge, verl, ms-swift, SkyRL, torchtitan)
	@tools/env/frameworks.sh

# A checkout of Megatron-LM's main, which no release has yet: an early warning.
test-main: env ## run the conformance tests with the Megatron-LM in CHECKOUT
	@tools/env/versions.sh $(or $(CHECKOUT),$(error CHECKOUT=path/to/Megatron-LM is needed))

test-long: env ## run what is too long for CI: all cases, other releases completely, sanitizers, the fault campaign (hours)
	@$(BIN)/python -m pytest -m long tests/golden tests/native tests/unit
	@$(MAKE) test-ranks
	@$(MAKE) test-versions
	@$(MAKE) test-lowest
	@$(MAKE) test-native-sanitizers
	@$(MAKE) test-faults

test-native-sanitizers: env ## run tests/native under the sanitizers of g++
	@tools/env/sanitizers.sh $(SANITIZERS)

test-aarch64: env ## build the native core for aarch64 and run its portable tests under qemu
	@tools/env/aarch64.sh

# Two at a time, each with its output in one piece.
LINTERS := lint-types lint-locks lint-native lint-imports lint-ruff
lint: env ## run ruff, clang-format, import-linter, mypy and the thread-safety analysis
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(LINTERS)

lint-ruff:
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-native:
	@echo "$(BIN)/clang-format --dry-run -Werror (all of cuda, tests and tools)"
	@$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

lint-locks:
	tools/env/thread_safety.sh

lint-imports:
	$(BIN)/lint-imports

lint-types:
	$(BIN)/mypy

format: env ## rewrite the sources with ruff and clang-format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

clean: ## remove build products and caches, but not .venv (`make env` builds again)
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	rm -f megatron_datastates/engine/_native*.so
	find benchmarks megatron_datastates recipes tests tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove .venv too
	rm -rf .venv
