# Each target creates the virtual environment it needs, with the versions and hashes of the lock files, and updates it when
# the requirements change.
#
#   make quickstart                                     train on the built-in corpus, evaluate, show translations
#   make quickstart ARGS="--config.data.target_lang=fr" WORKDIR=runs/en-fr
#                                                       another language pair, in its own workdir
#   make test        the tests, in minutes              make test ARGS="-k bleu"   some of the tests
#   make test-all    all tests, also the slow ones      make lint                  style and types
#   make bench       benchmarks that need no data       make clean                 environment and caches; keeps runs/
#   make lock        the lock files, from requirements/ (needs uv); ARGS=--upgrade takes the newest versions
#
# PYTHON=python3.12 selects the interpreter of the environment, and VENV=<folder> its location.

PYTHON ?= python3
VENV ?= .venv
WORKDIR ?= runs/quickstart
ARGS ?=
RUN := $(VENV)/bin/python
LOCK := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header

# Two stages: the quickstart should not wait for what only the tests need.
USE := $(VENV)/.installed-use
DEVELOP := $(VENV)/.installed-develop

.PHONY: quickstart test test-all lint bench lock clean

quickstart: $(USE)
	@$(RUN) launch/quickstart.py "$(WORKDIR)" $(ARGS)

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

# The second file has a part of the first one, in the same versions.
lock:
	$(LOCK) $(ARGS) --output-file requirements-dev-lock.txt requirements.txt requirements/gs.txt requirements/dev.txt
	$(LOCK) --constraint requirements-dev-lock.txt --output-file requirements-lock.txt \
	  requirements.txt requirements/gs.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(USE): requirements-lock.txt | $(RUN)
	$(RUN) -m pip install --quiet --require-hashes --requirement requirements-lock.txt
	@touch $@

# The locks lack PyTorch and its dependencies, which are not the same for CPUs and for CUDA.
$(DEVELOP): requirements-dev-lock.txt requirements-dev.txt $(wildcard requirements/*.txt) $(USE) | $(RUN)
	$(RUN) -m pip install --quiet --require-hashes --requirement requirements-dev-lock.txt
	$(RUN) -m pip install --quiet --requirement requirements-dev.txt
	@touch $@
