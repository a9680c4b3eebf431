# Everything runs in .venv, which the first target creates with $(PYTHON). Paths are relative, so the checkout can be anywhere.

PYTHON ?= python3
PYTHONS := 3.11 3.12 3.13
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
METADATA := pyproject.toml setup.cfg constraints.txt
# examples and benchmarks are checked if they contain Python
SCRIPTS := $(patsubst %/,%,$(sort $(foreach folder,examples benchmarks,$(if $(shell find $(folder) -name '*.py' 2>/dev/null | head -n 1),$(folder)))))

# Settings that the caller's shell has for another project must not affect this one.
unexport PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONDONTWRITEBYTECODE VIRTUAL_ENV MYPYPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A virtual environment holds absolute paths: if it was moved, or if its Python is gone, it is created again; otherwise it is kept.
STALE := $(shell [ -e $(VENV)/place ] && { [ -x $(BIN)/python ] && [ "$$(cat $(VENV)/place)" = "$$(pwd -P)" ] || echo stale; })

step = @printf '\n== %s\n'

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow test-gpu pythons lowest install install-dev lint types contracts pytest architecture pictures coverage faults ignite-suite docs dist format bench perf-check clean FORCE

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed ## train a small byte-level language model; prints where the results are
	$(step) 'Training the example: examples/byte_lm/config.yaml'
	@$(BIN)/pulsetrain train examples/byte_lm/config.yaml

test: lint types contracts pytest ## lint, types, import contracts, and the tests that are not slow
	$(step) 'All checks passed'

lint: $(VENV)/installed-dev ## ruff: rules and format
	$(step) 'Lint (ruff)'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/installed-dev ## mypy, strict
	$(step) 'Types (mypy)'
	@$(BIN)/python -m mypy pulsetrain $(SCRIPTS)

contracts: $(VENV)/installed-dev ## import-linter: which package may import which
	$(step) 'Import contracts (import-linter)'
	@$(BIN)/lint-imports --no-logo

pytest: $(VENV)/installed-dev ## the tests that are not slow, two at a time; e.g. make pytest ARGS="-n auto tests/engine"
	$(step) 'Tests (pytest)'
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' $(ARGS)

test-slow: $(VENV)/installed-dev ## the slow tests: installs, services, benchmarks, compilation, runs that are killed
	$(step) 'Slow tests (pytest)'
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow and not exhaustive' $(ARGS)

test-gpu: $(VENV)/installed-dev ## the tests that need an NVIDIA GPU; the others do not see it
	$(step) 'Tests on a GPU (pytest)'
	@$(BIN)/python -m pytest -m gpu $(ARGS)

pythons: ## make test with each Python version that is supported, each in an environment of its own below build/
	@for each in $(PYTHONS); do $(MAKE) PYTHON=python$$each VENV=build/python-$$each test || exit; done

lowest: $(VENV)/place ## the tests of the engine with the lowest versions that pyproject.toml accepts, in build/lowest
	$(step) 'Tests with the lowest versions (pytest)'
	@$(BIN)/python -m venv build/lowest
	@build/lowest/bin/python -m pip install --quiet $$($(BIN)/python tests/lowest_versions.py) pytest pytest-xdist hypothesis safetensors
	@build/lowest/bin/python -m pip install --quiet --no-deps -e .
	@build/lowest/bin/python -m pytest -m 'not slow' $(or $(ARGS),tests/engine/events tests/engine/recording tests/engine/step tests/engine/checkpoint tests/pulsetrain/configuration)

docs: $(VENV)/installed-dev ## the documentation as a site, in build/site; warnings are errors
	$(step) 'Documentation (mkdocs)'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo build/site/index.html

architecture: $(VENV)/installed-dev ## draw docs/architecture.svg from the imports
	@$(BIN)/python docs/draw_architecture.py

pictures: $(VENV)/installed-dev ## draw the other pictures of docs/ from runs that are trained for it; needs Chromium; e.g. make pictures ARGS=report
	@$(BIN)/python docs/draw_pictures.py $(ARGS)

coverage: $(VENV)/installed-dev ## all tests, and the lines that they miss; fails below 90%
	$(step) 'Coverage'
	@$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-fail-under=90 $(ARGS)

faults: $(VENV)/installed-dev ## the fault tests, and runs that are killed and resumed 1,000 times; about 40 minutes
	$(step) 'Fault tests'
	@$(BIN)/python -m pytest tests/faults
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m exhaustive
	$(step) 'Runs killed 1,000 times'
	@$(BIN)/python -m tests.faults.kills --kills 1000 $(ARGS)
	$(step) 'Runs of two processes, of which one is killed 100 times'
	@$(BIN)/python -m tests.faults.rank_kills --kills 100
	$(step) 'Launched runs, ended 20 times in each of four ways'
	@$(BIN)/python -m tests.faults.launches --times 20

ignite-suite: $(VENV)/installed-dev ## pytorch-ignite's own tests on our Engine; downloads its sources from the package index
	$(step) "Pytorch-ignite's own tests"
	@$(BIN)/python tests/ignite_suite.py $(ARGS)

dist: $(VENV)/installed-dev ## build the wheel and the source distribution into dist/
	$(step) 'Wheel and source distribution'
	@rm -rf build/lib dist
	@$(BIN)/python -c "from setuptools.build_meta import *; print(build_sdist('dist')); print(build_wheel('dist'))"

format: $(VENV)/installed-dev ## let ruff fix what it can
	$(step) 'Format (ruff)'
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(VENV)/installed-dev ## the benchmarks of docs/performance.md, about 15 minutes on 2 slow cores; e.g. make bench ARGS=trainers
	$(step) 'Benchmarks'
	@$(BIN)/python -m benchmarks $(ARGS)

perf-check: $(VENV)/installed-dev ## compare the benchmarks with their bounds on an idle machine; ARGS=--short: ratios, anywhere
	$(step) 'Bounds of the benchmarks'
	@$(BIN)/python -m benchmarks --check $(ARGS)

install: $(VENV)/installed ## create .venv with what a run needs
install-dev: $(VENV)/installed-dev ## create .venv with what the checks need as well

clean: ## remove caches and builds; .venv and runs/ stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Stamp files: each is newer than its prerequisites, so a second call has nothing to do.

$(VENV)/place: $(if $(STALE),FORCE)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'Pulsetrain needs Python 3.11 or newer; "$(PYTHON)" is' "$$("$(PYTHON)" --version 2>&1 || true)."; \
		echo 'Choose another one: make PYTHON=python3.11 ...'; exit 1; } >&2
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo '"$(PYTHON)" cannot make virtual environments: its modules venv and ensurepip are missing'; \
		echo '(on Debian and Ubuntu: apt-get install python3-venv).'; exit 1; } >&2
	$(step) 'Preparing $(VENV)'
	@{ [ -z '$(STALE)' ] && $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; } \
		|| "$(PYTHON)" -m venv --clear $(VENV)
	@pwd -P > $@

# torch is installed first and alone: pip then takes the build that this machine's index prefers, such as a CPU build.
$(VENV)/torch: $(VENV)/place constraints.txt
	$(step) 'Installing torch'
	@$(PIP) torch
	@touch $@

$(VENV)/installed: $(VENV)/torch $(METADATA)
	$(step) 'Installing pulsetrain'
	@$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/torch $(METADATA)
	$(step) 'Installing pulsetrain and what its checks need'
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed
