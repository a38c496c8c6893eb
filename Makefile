# Every target does its own set-up: a virtual environment in .venv with the package and what it needs.
# The set-up runs once; it runs again when pyproject.toml, constraints.txt or the native library's sources change.
#   make PYTHON=/path/to/python3.12 test     picks the interpreter that .venv is made from
# `make compat` has a virtual environment for each version of torch, as .venv-torch-2.15.0, and leaves .venv alone.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTEROP := $(VENV)/.interop
DOCS := $(VENV)/.docs

# An installation compiles them into the package.
NATIVE := hatch_build.py native/build.py $(wildcard native/*.[ch])

# For make compat: a version of torch, and more arguments for pytest, as ARGS="tests/interop -x". For make mutations: words
# that choose some of them, as ARGS=reducer. For make conformance-simulated: as ARGS="test_dtensor.py --source ../pytorch".
TORCH :=
ARGS :=

# Shared out to two processes more than there are cores, as some tests only wait. At most 4: each has a pool of ranks,
# about 2 GB of memory with it.
QUICK := -m "not slow" -n $$(($$(nproc) + 2)) --maxprocesses 4 --dist worksteal
# The tests start some hundred processes, which would all compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test slow mutations conformance conformance-simulated compat gpu docs wheels lint format clean

help:
	@echo "make demo    train a small language model on four ranks (dp=2, pp=2), after a forecast of its step"
	@echo "make test    run the quick tests"
	@echo "make slow    run the tests that make test leaves out"
	@echo "make mutations  break the code in small ways, one at a time, and see the nearest tests fail (half an hour)"
	@echo "make conformance  run PyTorch's own tests of torch.distributed over Gloo and over Echelon, and compare"
	@echo "make conformance-simulated  download PyTorch's own tests and run them over Gloo and on simulated ranks (an hour)"
	@echo "make compat TORCH=2.15.0  run the quick tests with another version of torch (gigabytes, some minutes)"
	@echo "make gpu     run the tests that need a GPU with CUDA"
	@echo "make docs    build the site of the documentation into site/"
	@echo "make wheels  make wheels for x86-64 and ARM64 and an sdist, all on this machine, into dist/"
	@echo "make lint    check formatting, style, types and prose"
	@echo "make format  format the code"
	@echo "make clean   remove .venv and .venv-torch-*, caches and outputs"

demo: $(STAMP) out/here.json
	$(BIN)/echelon foresee -n 4 --gpu out/here.json --network shared-memory examples/train_gpt.py --dp 2 --pp 2
	$(BIN)/echelon run -n 4 examples/train_gpt.py --dp 2 --pp 2

out/here.json: | $(STAMP)
	mkdir -p out
	$(BIN)/echelon foresee --calibrate $@

test: $(STAMP)
	$(BIN)/python -m pytest $(QUICK)

slow: $(INTEROP) $(DOCS)
	$(BIN)/python -m pytest -m slow --timeout 600 -o faulthandler_timeout=590

# One mutation at a time: tests that go by real time would fail for want of a core, and kill it for no reason.
mutations: $(STAMP)
	$(BIN)/python tools/mutations.py $(ARGS)

conformance: $(INTEROP)
	$(BIN)/python conformance/run.py

conformance-simulated: $(INTEROP)
	$(BIN)/python conformance/simulated.py $(ARGS)

ifeq ($(TORCH),)
compat:
	@echo "name a version of torch: make compat TORCH=2.15.0" >&2; exit 1
else
compat: .venv-torch-$(TORCH)/.installed
	.venv-torch-$(TORCH)/bin/python -m pytest $(QUICK) $(ARGS)
endif

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs

# The theme prints an advertisement of its successor unless this variable is set.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheels: $(STAMP)
	$(BIN)/python tools/wheels.py

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/prose.py src examples conformance tools/site tools/notebooks.py docs README.md CONTRIBUTING.md CHANGELOG.md

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-torch-* build dist out site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Makes the virtual environment $(1) with the first of these that really starts and is new enough: python3 may be old, and
# python3.12 may be a shim that fails.
define make_venv
	@set -e; new_enough='import sys; sys.exit(sys.version_info < (3, 11))'; \
	found=; tried="$(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)"; \
	for candidate in $$tried; do \
	    if "$$candidate" -c "$$new_enough" >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "Echelon needs Python 3.11 or newer, and none of these is: $$tried." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! "$(1)/bin/python" -c "$$new_enough" >/dev/null 2>&1; then \
	    echo "making $(1) with $$found"; rm -rf "$(1)"; \
	    "$$found" -m venv "$(1)" || { rm -rf "$(1)"; \
	        echo "$$found cannot make a virtual environment: install its venv module (python3-venv on Debian)" >&2; exit 1; }; \
	fi
endef

# The constraints file pins torch for development; pyproject.toml states the range that the package supports.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	$(call make_venv,$(VENV))
	@echo "installing the package and what it needs into $(VENV): this takes a minute or a few, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Lightning, Accelerate, TensorBoard and what PyTorch's own tests import.
$(INTEROP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,interop]"
	@touch $@

# mkdocs, its theme, what reads the docstrings and what runs the notebooks.
$(DOCS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs]"
	@touch $@

# The same with one version of torch, $*, in place of the one that constraints.txt pins.
.venv-torch-%/.installed: pyproject.toml constraints.txt $(NATIVE)
	$(call make_venv,$(@D))
	@echo "installing torch $*, the package and what it needs into $(@D): this takes some minutes, once"
	@sed '/^torch==/d' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt "torch==$*" -e ".[dev,interop]"
	@touch $@
