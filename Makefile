# `make demo` and `make test` need nothing but Python and make: they set up .venv first, and again when it is outdated.

PYTHON ?= python3
VENV ?= .venv
DEMO ?= demo-output
# What pip is given for torch before anything else. Where the plain requirement means a CUDA build and a CPU build will
# do, add PyTorch's CPU index: make demo TORCH='torch --index-url …'
TORCH ?= torch==2.13.0
WORKERS ?= 2

BIN := $(VENV)/bin
MODEL := calibration/assets/bookllama-7m
OUT := $(DEMO)/bookllama-7m-W4A16

.DELETE_ON_ERROR:
.PHONY: demo test lint format clean help

help:
	@echo "make demo    quantise, verify and evaluate the embedded model into $(DEMO)"
	@echo "make test    linters, types, directions of imports, tests with coverage"
	@echo "make lint    the first three of these"
	@echo "make format  sort imports and format the code"
	@echo "make clean   remove .venv, caches, builds and $(DEMO)"

demo: $(VENV)/.installed
	@mkdir -p $(DEMO)
	$(BIN)/compress quantize -o $(OUT) --scheme W4A16 --group-size 64 --overwrite
	$(BIN)/compress verify $(OUT) --reference $(MODEL)
	$(BIN)/compress eval-ppl $(OUT) --reference $(MODEL) --dataset embedded --limit 16
	@echo
	@echo "The model was trained on books and the text is from Wikipedia, so its perplexity says little;"
	@echo "the KL beside it tells what compression changed."
	@echo "Packed model: $(OUT) (report: compress_report.json, model card: README.md)"
	@echo "Original:     $(MODEL)"
	@echo "Next:         $(BIN)/compress --help"

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --cov --cov-report=term

lint: $(VENV)/.developing .typing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.developing
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .typing build dist *.egg-info $(DEMO) .coverage .coverage.* .hypothesis .import_linter_cache
	rm -rf .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The CPU build of torch comes first, else the next line would bring whatever build is the default.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.developing: pyproject.toml $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# basedpyright finds `import compress_llm` through a folder that holds the checkout under that name.
.typing:
	mkdir $@
	ln -s .. $@/compress_llm
