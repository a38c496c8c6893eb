# Every target does its own set-up: a virtual environment in .venv with the package and what it needs.
# The set-up runs once; it runs again when pyproject.toml or constraints.txt change.
#   make PYTHON=/path/to/python3.12 test     picks the interpreter that .venv is made from

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INTEROP := $(VENV)/.interop

.PHONY: help demo test slow conformance gpu lint format clean

help:
	@echo "make demo    train a small language model on four ranks (dp=2, pp=2)"
	@echo "make test    run the quick tests"
	@echo "make slow    run the tests that make test leaves out"
	@echo "make conformance  run PyTorch's own tests of torch.distributed over Gloo and over Echelon, and compare"
	@echo "make gpu     run the tests that need a GPU with CUDA"
	@echo "make lint    check formatting, style and types"
	@echo "make format  format the code"
	@echo "make clean   remove .venv, caches and outputs"

demo: $(STAMP)
	$(BIN)/echelon run -n 4 examples/train_gpt.py --dp 2 --pp 2

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

slow: $(INTEROP)
	$(BIN)/python -m pytest -m slow --timeout 600 -o faulthandler_timeout=590

conformance: $(INTEROP)
	$(BIN)/python conformance/run.py

gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu -rs

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that really starts and is new enough: python3 may be old, and python3.12 may be a shim that fails.
# The constraints file pins torch for development; pyproject.toml states the range that the package supports.
$(STAMP): pyproject.toml constraints.txt
	@set -e; new_enough='import sys; sys.exit(sys.version_info < (3, 11))'; \
	found=; tried="$(or $(PYTHON),python3 python3.11 python3.12 python3.13 python3.14)"; \
	for candidate in $$tried; do \
	    if "$$candidate" -c "$$new_enough" >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "Echelon needs Python 3.11 or newer, and none of these is: $$tried." >&2; \
	    echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if ! "$(BIN)/python" -c "$$new_enough" >/dev/null 2>&1; then \
	    echo "making $(VENV) with $$found"; rm -rf "$(VENV)"; \
	    "$$found" -m venv "$(VENV)" || { rm -rf "$(VENV)"; \
	        echo "$$found cannot make a virtual environment: install its venv module (python3-venv on Debian)" >&2; exit 1; }; \
	fi
	@echo "installing the package and what it needs into $(VENV): this takes a minute or a few, once"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# Lightning, Accelerate and what PyTorch's own tests import.
$(INTEROP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,interop]"
	@touch $@
