# Each target does all its set-up in .venv; nothing but Python 3.11+ and make is needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-all lint clean

demo: $(READY)
	$(BIN)/underpar demo

# Two at a time, a file by one worker: files share what they train.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

test: $(READY)
	$(PYTEST) -m "not slow and not gpu and not fineweb"

test-all: $(READY)
	$(PYTEST) -m "not gpu and not fineweb"

lint: $(READY)
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo build dist
