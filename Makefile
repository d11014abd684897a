# Every target does its own set-up, once: the environment is made again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := tokenformer tests benchmarks experiments examples

.PHONY: demo test test-slow bench docs check format clean
.DELETE_ON_ERROR:

demo: .venv/.core           ## train a small TokenFormer on Python's own sources, grow it, train on; draws the curves
	$(BIN)/tokenformer demo

test: .venv/.dev            ## everything but the tests marked slow, in parallel
	$(BIN)/pytest -m "not slow" -n auto --dist worksteal

test-slow: .venv/.slow      ## the tests marked slow: compilation, kernels for GPUs, the whole demo
	$(BIN)/pytest -m slow

bench: .venv/.dev           ## speed and memory against peers, in minutes; tables, a results file and its picture
	$(BIN)/python -m benchmarks

docs: .venv/.docs           ## the documentation site in site/; a broken link or docstring fails the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

check: .venv/.dev           ## lint, formatting, types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf .venv build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.core: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

# The development environment contains the core one, so `make demo` after `make test` installs nothing.
.venv/.dev: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch .venv/.core $@

# Triton takes 700 MB, so only the tests that need it install it.
.venv/.slow: .venv/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gpu]"
	touch $@

# The API reference is read from the sources, so nothing of tokenformer is imported for it.
.venv/.docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch .venv/.core $@
