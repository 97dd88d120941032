# Every target does all of its own set-up: on a fresh machine `make train` or `make test` is the only command to type.
# Needed beforehand: Python 3.11 or newer with venv, make, and (better, not needed) a C++ compiler.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# Idle OpenMP threads that spin steal the cores from whoever works: a contended step was measured 11 times slower.
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1
# Bytecode is kept (git ignores it) wherever the environment says otherwise: a hundred tests start interpreters that import all of memfit.
unexport PYTHONDONTWRITEBYTECODE

TEST_WORKERS ?= 2
TEST_ARGS ?=
FUZZ_EXAMPLES ?= 1000
LIVES ?= 200
TRAIN_RECIPE ?= gpt2-small
# Empty: 1.25GiB, or 1.75GiB where torch is a build for CUDA, whose libraries take more of the process.
TRAIN_LIMIT ?=
TRAIN_STEPS ?= 10
# Where the run is committed, step by step, and goes on from; empty: nowhere.
TRAIN_STORE ?= runs/$(TRAIN_RECIPE)
TRAIN_ARGS ?=

.PHONY: help install lint format test test-device test-compiled test-hosts test-hosts-oldest test-pythons zoo-device mutations fuzz fuzz-ranks fuzz-lives golden-answers sizes prose train vocabulary docs wheel clean

help:
	@echo "make fuzz-ranks $(FUZZ_EXAMPLES) random plans for ranks, against plain PyTorch"
	@echo "make fuzz-lives $(LIVES) kills and a quarter as many stops of ranks, at random instants of their lives"
	@echo "make golden-answers plans, predictions and refusals of 60 drawn questions, against those on file"
	@echo "make sizes      code lines, tokens, words and files by package"
	@echo "make prose      words that hide the noun, counted"
	@echo "make train      train a 124M-parameter GPT-2 on real text inside $(or $(TRAIN_LIMIT),1.25GiB); typed again, it goes on"
	@echo "make test       lint, types and every test"
	@echo "make test-device the accelerator path alone (on CUDA where it is, else on an emulated device)"
	@echo "make test-hosts the trainers of other libraries (installs Lightning and TRL)"
	@echo "make test-hosts-oldest those tests on the oldest versions that are served"
	@echo "make test-pythons README's lines and a sample of the tests on each Python that is there, with the torch that it is served"
	@echo "make zoo-device the zoo and 300 random modules on it, in ways drawn from seeds, with a table (a quarter of an hour)"
	@echo "make mutations  each ordering of the accelerator path taken out once: a test must notice"
	@echo "make lint       ruff and pyright only"
	@echo "make format     let ruff put the files in order"
	@echo "make fuzz       $(FUZZ_EXAMPLES) random modules under random plans, against plain PyTorch"
	@echo "make docs       these pages as a site, in build/site (installs mkdocs-material)"
	@echo "make wheel      a wheel in dist/ that needs no compiler"
	@echo "make vocabulary train the recipes' byte-pair vocabulary again"
	@echo "make install    the virtual environment only (the others call it)"

install: $(STAMP)

# A dangling link (the interpreter went away) counts as missing, so --clear builds the environment anew.
$(PYTHON):
	@for candidate in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	    if command -v "$$candidate" >/dev/null && \
	       "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "creating $(VENV) with $$($$candidate --version)"; \
	        exec "$$candidate" -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo "no Python >= 3.11 with venv found: install one (Debian and Ubuntu: apt install python3 python3-venv)" >&2; exit 1

# torch first and alone: whichever build of the pinned version the machine offers is settled before anything asks for torch.
# No build isolation: the pinned setuptools builds the package, nothing unpinned is downloaded for it.
$(STAMP): pyproject.toml constraints.txt | $(PYTHON)
	$(PYTHON) -m pip install --quiet --constraint constraints.txt torch setuptools
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $@

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright

format: install
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# One thread a worker: two workers with two threads each would fight over two cores.
# pyright and the compiled tests keep one core busy at most, so they run beside the device suite; each prints when it is through, all end before one fails it.
test: install
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target $(if $(TEST_ARGS),lint,test-device lint test-compiled)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -n $(TEST_WORKERS) --dist worksteal $(if $(TEST_ARGS),$(TEST_ARGS),-m "not compiles")

# What torch.compile has compiled, and how often, belongs to the process: behind thousands of other tests the same code met its recompile limit.
test-compiled: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -m compiles tests/equivalence

# Trainers of other libraries, at the pinned versions: what `make install` leaves out of them is installed here.
test-hosts: install
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test,lightning,trl]"
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -n $(TEST_WORKERS) --dist worksteal tests/integrations $(TEST_ARGS)

# The same of the oldest versions that are served, beside those of the environment.
test-hosts-oldest: install
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test,lightning]"
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(VENV)/oldest-hosts --requirement oldest-hosts.txt
	PYTHONPATH=$(VENV)/oldest-hosts OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -n $(TEST_WORKERS) --dist worksteal -W ignore::DeprecationWarning tests/integrations/test_transformers.py tests/integrations/test_lightning.py $(TEST_ARGS)

# Each Python that is found (pyenv's too) gets an environment of its own, and the build of torch that its registry serves: of the CPU or of CUDA.
# PYTHONS="/path/of/python ..." names others, PYTHONS_TESTS other tests.
PYTHONS ?=
PYTHONS_TESTS ?= tests/test_docs.py tests/memory/test_library_pages.py tests/memory/test_outside.py tests/unit/test_python_calls.py tests/unit/test_blocks.py tests/unit/test_interrupts.py
test-pythons:
	@seen=" "; status=0; \
	for python in $(or $(PYTHONS),python3.11 python3.12 python3.13 python3.14 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/*/bin/python); do \
	    version="$$($$python -c 'import sys, venv, ensurepip; sys.version_info >= (3, 11) and print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || continue; \
	    if [ -z "$$version" ] || [[ "$$seen" == *" $$version "* ]]; then continue; fi; \
	    seen="$$seen$$version "; own="$(VENV)-$$version"; \
	    [ -e "$$own/.installed" ] || { \
	        "$$python" -m venv --clear "$$own"; \
	        "$$own/bin/python" -m pip install --quiet --constraint constraints.txt torch setuptools; \
	        "$$own/bin/python" -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'; \
	        touch "$$own/.installed"; }; \
	    "$$own/bin/python" -c 'import sys, torch; print(f"--- Python {sys.version.split()[0]}, torch {torch.__version__}")'; \
	    OMP_NUM_THREADS=1 "$$own/bin/python" -m pytest --color=no --slow tests/test_readme.py || status=1; \
	    OMP_NUM_THREADS=1 "$$own/bin/python" -m pytest --color=no $(PYTHONS_TESTS) || status=1; \
	done; exit $$status

# The accelerator path, on CUDA or else on a device made for tests: it is registered with torch for good, so in processes of its own.
test-device: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -n $(TEST_WORKERS) --dist worksteal tests/accelerator tests/device

# ZOO_ARGS: --ways, --modules, --seed, --device.
zoo-device: install
	$(PYTHON) benchmarks/zoo_device.py $(ZOO_ARGS)

# MUTATION=regex tries those whose sentence matches.
mutations: install
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PYTHON) -m pytest -q -p accelerator.mutants --mutations device.mutations $(if $(MUTATION),--only "$(MUTATION)") --device late --slow tests/device

fuzz: install
	$(PYTHON) -m pytest tests/equivalence/test_random_modules.py --examples $(FUZZ_EXAMPLES) --timeout 0 -o faulthandler_timeout=0 $(TEST_ARGS)

# Random plans for two and three ranks, which they may disagree about: the bits of one process, or refused on all.
fuzz-ranks: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest tests/distributed/test_random_plans.py --examples $(FUZZ_EXAMPLES) --timeout 0 -o faulthandler_timeout=0 $(TEST_ARGS)

# Code lines, tokens, words and files by package.
sizes: install
	$(PYTHON) benchmarks/sizes.py

# Words that hide the noun, in 1,000 words of docstrings, comments, messages and documents; fails while they are too many.
prose: install
	$(PYTHON) benchmarks/prose.py

# Answers of the planner to drawn questions; `tests/golden/questions.py` writes them anew.
golden-answers: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --color=no -n $(TEST_WORKERS) tests/golden/test_golden_answers.py --slow $(TEST_ARGS)

# Ranks that are killed or stopped (SIGSTOP) at random instants of their whole life: the others hear of it in time, and the run goes on with the same bits.
fuzz-lives: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -s tests/distributed/test_lives.py --examples $(LIVES) --timeout 0 -o faulthandler_timeout=0 $(TEST_ARGS)

train: install
	@limit="$(TRAIN_LIMIT)"; \
	if [ -z "$$limit" ]; then \
	    limit=1.25GiB; \
	    if $(PYTHON) -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then \
	        limit=1.75GiB; \
	        echo "torch is built for CUDA, and its libraries count: the limit is $$limit (TRAIN_LIMIT= names another)"; \
	    fi; \
	fi; \
	set -x; \
	$(PYTHON) -m memfit train --recipe $(TRAIN_RECIPE) --limit "$$limit" --steps $(TRAIN_STEPS) $(if $(TRAIN_STORE),--store $(TRAIN_STORE)) $(TRAIN_ARGS)

vocabulary: install
	$(PYTHON) benchmarks/train_vocabulary.py

# Pages with broken links are errors (mkdocs.yml, strict).
docs: install
	$(PYTHON) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	$(PYTHON) -m mkdocs build

# With the allocator compiled for the installed torch, so that no compiler is needed where the wheel goes.
wheel: install
	rm -rf build/lib build/bdist.*
	MEMFIT_PREBUILD=1 $(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VENV)-* build dist .pytest_cache .ruff_cache .hypothesis
