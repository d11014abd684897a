# Every target sets up .venv by itself and again only when pyproject.toml changes.
PYTHON ?= python3
BIN := .venv/bin
SOURCES := tokenformer tests benchmarks experiments examples

.PHONY: demo test test-slow bench reproduce docs check format clean
.DELETE_ON_ERROR:

demo: .venv/.core           ## train a small TokenFormer on Python's standard library, grow it, train on; plots the loss
	$(BIN)/tokenformer demo

test: .venv/.dev            ## all tests except those marked slow, in parallel
	$(BIN)/pytest -m "not slow" -n auto --dist worksteal

test-slow: .venv/.slow      ## the tests marked slow: compilation, GPU kernels in an interpreter, the whole demo
	$(BIN)/pytest -m slow -n 2 --dist worksteal

bench: .venv/.dev           ## speed and memory against baselines, about 25 minutes; tables, a results file and a plot
	$(BIN)/python -m benchmarks

reproduce: .venv/.dev       ## every table and figure of the paper at laptop scale, under 4 hours on two cores; resumes
	$(BIN)/python -m experiments run

docs: .venv/.docs           ## build the documentation into site/; fails on a broken link or docstring
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

# Triton takes 700 MB, so only the slow tests install it.
.venv/.slow: .venv/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gpu]"
	touch $@

# mkdocstrings parses the sources for the API reference and does not import them.
.venv/.docs: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	touch .venv/.core $@
