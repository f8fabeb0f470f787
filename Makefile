# make demo | demo-llm            do all the set-up they need, once
# make check                      format, lint, types, imports and unit tests: before every commit
# make test                       all that, and every other test but the nightly ones: before a merge, in CI
# make nightly                    all that, and every test: variants of what others cover, benchmarks in their short form
# make setup | setup-dev          the environment alone: to run, to develop
# make lock                       the locks anew from requirements/*.in
# make audit                      the locks against a database of vulnerabilities; `make nightly` does it too
# make sbom                       sbom.cdx.json, the packages of this environment and machine
# VENV=folder, PYTHON=python3.12  where the environment goes, what makes it

VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
UV := $(PY) requirements/uv.py
# Only files that the lock has the hash of, and only wheels: no package runs code while it is installed.
INSTALL := $(UV) pip install --quiet --compile-bytecode --no-deps --require-hashes --no-build -r

.PHONY: setup setup-dev demo demo-llm check test nightly lint types imports unit ray-and-pages all-else lock audit sbom
.DELETE_ON_ERROR:

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

demo: setup
	@$(PY) -m examples.sort.demo

demo-llm: setup
	@$(PY) -m examples.smollm.demo

TOGETHER = $(MAKE) --no-print-directory --output-sync=target -j3

check: setup-dev
	@$(TOGETHER) unit types lint imports

test: setup-dev
	@$(TOGETHER) types lint imports
	@$(TOGETHER) ray-and-pages all-else

nightly: setup-dev
	@$(TOGETHER) types lint imports
	@$(TOGETHER) PROFILE=nightly DAILY= ray-and-pages all-else audit

# Hundreds of processes import the same modules: each would compile them again.
export PYTHONDONTWRITEBYTECODE :=

# Examples that Hypothesis tries (tests/conftest.py), and what is left out by day.
PROFILE := daily
DAILY := and not nightly
PYTEST := $(PY) -m pytest --hypothesis-profile=$(PROFILE)

# Two lanes for two cores, of about the same length: a test with Ray has several processes and mostly waits for them,
# and those of the browser wait for pages; all others keep one core busy, and those with vLLM come last, when the lane
# beside is in the browser. Ranks and replicas have deadlines, so a third lane would cost more than it gains.
ray-and-pages:
	failed=0; \
	$(PYTEST) tests/ray tests/oracle tests/contract tests/cluster -m "ray $(DAILY)" || failed=1; \
	$(PYTEST) tests/browser -m "browser $(DAILY)" || failed=1; \
	exit $$failed

all-else:
	$(PYTEST) -m "not ray and not browser $(DAILY)"

lint:
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/biome check --assist-enabled=false --error-on-warnings

types:
	$(VENV)/bin/pyrefly check --python-interpreter-path $(PY) --min-severity error --summary=none

imports:
	$(VENV)/bin/lint-imports

unit:
	$(PYTEST) -n 2 --dist loadgroup --no-loadscope-reorder tests/unit -m "not slow and not nightly"

$(VENV)/.uv: requirements/installer.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rlsys needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Install one (for instance: apt install python3.11 python3.11-venv) and name it: make PYTHON=python3.11 ..." >&2; \
	  exit 1; }
	@echo "set-up: environment in $(VENV)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check --require-hashes --only-binary :all: -r $<
	@touch $@

$(VENV)/.locked: requirements/cpu.lock | $(VENV)/.uv
	@echo "set-up: $$(grep -c == $<) packages from $<" >&2
	@$(INSTALL) $<
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.locked
	@$(UV) pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.installed-dev: requirements/dev.lock $(VENV)/.installed
	@echo "set-up: $$(grep -c == $<) packages from $<" >&2
	@$(INSTALL) $<
	@touch $@

COMPILE = pip compile --quiet --generate-hashes --python-version 3.11 --no-annotate --no-emit-find-links \
  --no-emit-index-url --custom-compile-command "make lock"
OVERRIDES := --override requirements/cpu-overrides.txt

lock: $(VENV)/.uv
	$(UV) $(COMPILE) requirements/installer.in -o requirements/installer.lock
	$(UV) $(COMPILE) $(OVERRIDES) requirements/cpu.in -o requirements/cpu.lock
	$(UV) $(COMPILE) $(OVERRIDES) --override requirements/cpu.lock requirements/dev.in -o requirements/dev.lock
	cat requirements/cpu.lock requirements/cuda.lock > requirements/cuda.new # where cuda.in leaves a choice: as in these
	$(UV) --cuda $(COMPILE) --no-build requirements/cuda.in -o requirements/cuda.new
	mv requirements/cuda.new requirements/cuda.lock

audit: setup
	$(PY) requirements/audit.py

sbom: setup
	$(PY) requirements/sbom.py > sbom.cdx.json
