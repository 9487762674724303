# `make demo` and `make test` are the two commands; both make the environment first, once.

PYTHON ?= python3
JOBS ?= 2
RANKS ?= 2
VENV := .venv
TORCH ?= 2.15.0
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
DOCS_STAMP := $(VENV)/.docs-stamp

LONG := every_lowered_case or every_optimizer or long

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all docs fuzz optimizers corpus lint format unit test-torch bench clean

help:
	@echo "make demo    train a small GPT, eager and wholestep side by side, in one process and on two ranks"
	@echo "make test    lint, type-check and test everything"
	@echo "make fuzz    random training steps against eager (SEED=, COUNT=; SECONDS=3600: new seeds for an hour)"
	@echo "make test-all    make test, fuzz and optimizers, and the whole capture suite under Inductor (two hours or more)"
	@echo "make docs    the documentation as a site, into build/docs; a warning or a link that leads nowhere is an error"
	@echo "make lint    ruff and mypy only          make format   rewrite files the way ruff wants them"
	@echo "make unit    pytest only (ARGS='-k name' selects)"
	@echo "make test-torch TORCH=2.15.0    the tests on another torch, in an environment of its own (CONTRIBUTING.md says what that takes)"
	@echo "make optimizers   all optimizers of other packages against eager"
	@echo "make corpus  some 500 training steps of other people's models, optimizers and recipes against eager; writes docs/corpus.md"
	@echo "make bench   per-call overhead, capture time and memory, against eager"
	@echo "make clean   remove the environment and every cache"

env: $(STAMP)

# The stamp is newer than both files once everything is installed, so a second run installs nothing.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "wholestep needs Python 3.11 or newer; set PYTHON=")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -m pip install -c $(CONSTRAINTS) --no-deps timm
	@touch $@

# What builds the site and what runs notebooks: not needed by `make test`.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c $(CONSTRAINTS) -e '.[docs,notebooks]'
	@touch $@

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo "build/docs/index.html opens from disk; GitHub Pages serves build/docs as it is"

demo: $(STAMP)
	$(BIN)/python examples/demo.py $(ARGS)
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) examples/demo_ranks.py $(RANK_ARGS)

# Beside each other: mypy has one core to itself for most of a minute, and the tests wait for each other now and then.
test: $(STAMP)
	$(MAKE) --no-print-directory -j 2 lint unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# One torch thread per worker: two workers with two threads each would fight over two cores. With `load` each worker runs
# its tests in the order of tests/conftest.py: those after which no rank can be forked from their process (a fake process
# group, Inductor) come last. Bytecode is written: every test process would compile the same modules again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist load

unit: $(STAMP)
	$(PYTEST) -m "not ($(LONG))" $(ARGS)

# The same pins with another torch. `make` variables on the command line override those above.
.venv-torch-$(TORCH).txt: constraints.txt
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

test-torch: .venv-torch-$(TORCH).txt
	$(MAKE) unit VENV=.venv-torch-$(TORCH) CONSTRAINTS=.venv-torch-$(TORCH).txt

optimizers: $(STAMP)
	$(PYTEST) tests/packages $(ARGS)

corpus: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m corpus --write-page $(ARGS)

# 2,000 random programs, 50 of them also compiled; SHOW=17 prints and runs the program of one seed.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m fuzz --jobs $(JOBS) $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SHOW),--show $(SHOW)) $(ARGS)

test-all: test docs fuzz optimizers corpus
	$(PYTEST) -m long $(ARGS)
	$(PYTEST) -m every_lowered_case $(ARGS)

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
