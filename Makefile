# `make demo` and `make test` set up everything they need, in the active virtual environment or in .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --constraint constraints.txt

# what an environment holds is named by a stamp file: a changed pyproject.toml (or another checkout) installs anew
KEY := $(shell (cat pyproject.toml constraints.txt; pwd) | cksum | cut -d' ' -f1)
RUN := $(VENV)/octavo-run-$(KEY)
DEV := $(VENV)/octavo-dev-$(KEY)

# a process a processor, each file's tests in one; each computes in one thread, since threads that wait for work spin
PYTEST := pytest -q -n logical --dist loadfile
test test-slow test-jax-next: export OMP_NUM_THREADS := 1
# XLA compiles thousands of small programs: as in JAX's own tests, without what only makes them faster. The other two targets
# have it compile as it does for users
test: export JAX_DISABLE_MOST_OPTIMIZATIONS := 1

# the second leg: the JAX half on a newer Python, with the newest JAX and without torch
PYTHON_NEXT ?= $(shell PYENV_VERSION=3.12.1 python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null)
NEXT := $(CURDIR)/.venv-next
DEV_NEXT := $(NEXT)/octavo-dev-$(KEY)

.PHONY: help demo test test-slow test-jax-next conformance lint format types wheel-check clean

help:  ## lists the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(RUN) fetch  ## generates text with the embedded model
	$(VENV)/bin/octavo generate --model smollm2 --chat --temperature 0 --max-tokens 100 --prompt "What is gravity?"

test: $(DEV) fetch  ## runs every test but the slow ones
	$(PY) -m $(PYTEST) -m "not slow and not gpu and not tpu" $(ARGS)

test-slow: $(DEV) fetch  ## runs the slow tests
	$(PY) -m $(PYTEST) -m "slow and not gpu and not tpu" --durations=10 $(ARGS)

test-jax-next: $(DEV_NEXT)  ## runs the JAX half on Python 3.12 and the newest JAX, without torch
	$(NEXT)/bin/python -m octavo.engine.loading.fetch smollm2
	$(NEXT)/bin/python -m $(PYTEST) -m "not slow and not gpu and not tpu" --backends jax $(ARGS)

conformance: $(DEV)  ## writes docs/conformance.md anew
	cd tests && $(PY) conformance.py > ../docs/conformance.md

lint: $(DEV)  ## checks style
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(DEV)  ## formats and sorts imports
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(DEV)  ## checks types
	mkdir -p .typecheck && ln -sfn .. .typecheck/octavo
	$(VENV)/bin/pyright --pythonpath $(PY)

wheel-check: $(DEV) fetch  ## builds the wheel and generates from it, once with each backend alone
	$(PY) .ci/wheel_check.py

.PHONY: fetch
fetch: $(RUN)
	@$(PY) -m octavo.engine.loading.fetch smollm2

$(PY):
	$(PYTHON) -m venv $(VENV)

$(RUN): | $(PY)
	@echo "installing octavo with both backends into $(VENV) (minutes, once)"
	@$(PIP) --upgrade pip
	@$(PIP) --editable '.[jax,torch]'
	@rm -f $(VENV)/octavo-run-* && touch $@

$(DEV): $(RUN)
	@echo "installing what tests and checks need"
	@$(PIP) --editable '.[jax,torch,server,dev]'
	@rm -f $(VENV)/octavo-dev-* && touch $@

$(DEV_NEXT):
	@test -n "$(PYTHON_NEXT)" || { echo "no python3.12 here: set PYTHON_NEXT" >&2; exit 1; }
	$(PYTHON_NEXT) -m venv $(NEXT)
	@echo "installing the JAX half into $(NEXT)"
	@$(NEXT)/bin/python -m pip install -qq --upgrade pip
	@$(NEXT)/bin/python -m pip install -qq --editable '.[jax,grammar,plot]' hypothesis psutil pytest pytest-timeout pytest-xdist 'jax>=0.11'
	@rm -f $(NEXT)/octavo-dev-* && touch $@

clean:  ## removes what make made
	rm -rf .venv .venv-next .typecheck .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
