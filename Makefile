# Every target makes its own virtual environment, in the versions of requirements-lock.txt, and remakes it when those change.
#
#   make quickstart                                     train on the built-in corpus, evaluate, show translations
#   make quickstart ARGS="--config.data.target_lang=fr" WORKDIR=runs/en-fr
#                                                       another language pair needs a workdir of its own
#   make test        the tests, minutes                 make test ARGS="-k bleu"   some of them
#   make test-all    also the slow ones                 make lint                  style and types
#   make bench       the figures that need no data      make clean                 environment and caches; runs/ stays
#
# PYTHON=python3.12 chooses the interpreter that the environment is made with, VENV=<folder> where it lies.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart
ARGS ?=
RUN := $(VENV)/bin/python

# Two stages, because the tests compare with PyTorch and a first translation should not wait for its download.
USE := $(VENV)/.installed-use
DEVELOP := $(VENV)/.installed-develop

.PHONY: quickstart test test-all lint bench clean

quickstart: $(USE)
	@$(RUN) launch/quickstart.py $(WORKDIR) $(ARGS)

test: $(DEVELOP)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" --durations=10 $(ARGS)

test-all: $(DEVELOP)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

lint: $(DEVELOP)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

bench: $(DEVELOP)
	@set -e; for name in loss depth growth "plan memory" "plan time"; do echo "== $$name"; $(RUN) -m benchmarks.$$name; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(USE): requirements.txt requirements-lock.txt | $(RUN)
	$(RUN) -m pip install --quiet --requirement requirements.txt --constraint requirements-lock.txt
	@touch $@

$(DEVELOP): requirements-dev.txt $(USE) | $(RUN)
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt --constraint requirements-lock.txt
	@touch $@
