# `make train` and `make test` need Python 3.11 or newer, git and make, and make everything else themselves.
PYTHON ?= python3
VENV ?= .venv
# three on two cores, because tests also wait for processes that they start
TEST_WORKERS ?= 3

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS_TESTS ?= 1
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes: each would compile what it imports again

.PHONY: help setup train test test-all lint site clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: $(STAMP) ## make .venv and install Tandem with its development tools

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh
	@touch $(STAMP)

train: $(STAMP) ## GRPO on one-digit addition with a real 135M model, a few minutes on two cores
	$(RUN) examples/addition_grpo.py trial_name=$$(date +%Y-%m-%d_%H-%M-%S)

test: $(STAMP) ## the fast tests
	OMP_NUM_THREADS=$(OMP_NUM_THREADS_TESTS) $(RUN) -m pytest -m "not slow" -n $(TEST_WORKERS) --dist loadfile

test-all: $(STAMP) ## every test, the slow ones and those on the real model included
	OMP_NUM_THREADS=$(OMP_NUM_THREADS_TESTS) $(RUN) -m pytest -n $(TEST_WORKERS) --dist loadfile

lint: $(STAMP) ## style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

site: $(STAMP) ## the pages of docs/ and the public names as a site, in build/site; a broken link is an error
	$(RUN) -m sphinx --quiet --fail-on-warning --keep-going --jobs 2 docs build/site
	@echo "build/site/index.html"

clean: ## remove the environment and caches; runs/ and the model cache stay
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
