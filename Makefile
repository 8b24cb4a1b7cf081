# Everything here works in any order, twice in a row, and from a path with a space in it.
PYTHON ?= python3.11
TORCH_INDEX ?=
VENV := .venv/bin
# -I: neither the working directory nor user site-packages can shadow an import
PY := $(VENV)/python -I
ARGS ?=
FAULTS ?= 25
SEED ?= 1
# a program that makes a link between two network namespaces (docs/chaos.md)
LINK ?= ../shared/tunlink.py

.DEFAULT_GOAL := help
.PHONY: help setup demo test chaos check bench docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

setup: ## build .venv (TORCH_INDEX=URL: an index with CPU builds of torch; PYTHON=python3.11)
	@command -v "$(PYTHON)" >/dev/null || { echo "setup: $(PYTHON) not found; install Python 3.11 or run make with PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup.py --torch-index "$(TORCH_INDEX)"

demo: setup ## the whole loop on this machine (ARGS="--preset smollm2 --steps 50")
	@$(PY) -m anabranch.cli.main demo $(ARGS)

test: setup ## all tests (ARGS="-k name" for some)
	@# slow links need `ip`, contract tests Debian's Redis, stepped clocks faketime, the viewer a browser; elsewhere these tests skip and say so
	@lacking=""; \
	command -v ip >/dev/null || lacking="$$lacking iproute2"; \
	command -v redis-server >/dev/null || command -v redis-check-rdb >/dev/null || lacking="$$lacking redis-tools"; \
	command -v faketime >/dev/null || lacking="$$lacking faketime"; \
	command -v chromium >/dev/null || lacking="$$lacking chromium fonts-dejavu-core"; \
	if [ -n "$$lacking" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends $$lacking; fi
	@$(PY) -m pytest $(ARGS)

chaos: setup ## break the whole pipeline and account for every group, as root (FAULTS=25 SEED=1 LINK=PROGRAM ARGS="--report FILE")
	@$(PY) -m anabranch.cli.main chaos run --program "$(LINK)" --faults $(FAULTS) --seed $(SEED) $(ARGS)

check: setup ## ruff, mypy, import rules
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(PY) -m mypy
	@$(PY) scripts/check_imports.py

bench: setup ## measure what the README claims (ARGS="--help")
	@$(PY) -m anabranch.cli.main bench all $(ARGS)

docs: setup ## regenerate the generated pages
	@$(PY) scripts/generate_docs.py

clean: ## remove caches and builds (not .venv, not runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
