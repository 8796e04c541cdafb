# What is done with this project, by name: `make help` lists it. Nothing here knows the product; it only starts tools.
#
# Every target makes `.venv` first, from `constraints.txt`, and says so. A second call finds it ready. Where packages
# come from is pip's business: its own configuration and PIP_* variables are honoured.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/ready

# The first of these that runs, is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# What pip is asked for as PyTorch: a version, a local version such as torch==2.13.0+cu130, or the path of a wheel.
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)

# What is measured against what, and where the peers' environments and the models are kept.
PEERS ?= transformers
WORK ?= w1
BENCH_HOME ?= build/bench

# Test processes at a time. Tests of one file stay in one process, in order.
JOBS ?= 2
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --constraint $(VENV)/constraints.txt

# What a server and the demonstration import. Importing it compiles it.
SERVED := import lineclear.scheduler.app, lineclear.worker.app, lineclear.worker.runner_factory, lineclear.cli.app

.PHONY: help demo test serve bench bench-micro bench-neighbour simulation fuzz chaos mutants privacy soak hostile images lint format stubs clean
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON (an interpreter >= 3.11), TORCH (what pip installs as PyTorch), JOBS (test processes),"
	@echo "MODEL, PEERS (of transformers, vllm, llama), WORK (w1 to w5) and BENCH_HOME (environments and models) of bench"

demo: $(STAMP) ## Serve a small model on this machine, talk to it, show what happens
	@$(BIN)/python demo/run.py

test: $(STAMP) ## Run every check: ruff, import-linter, mypy, pytest
	@start=$$(date +%s); failed=; export OMP_NUM_THREADS=1; \
	$(BIN)/python -m mypy >$(VENV)/mypy.txt 2>&1 & mypy=$$!; \
	for step in 'ruff check .' 'ruff format --check .' lint-imports 'pytest -q -n $(JOBS) --dist loadfile'; do \
		echo "--- $$step"; $(BIN)/$$step || failed="$$failed '$$step'"; \
	done; \
	echo "--- mypy, meanwhile"; wait $$mypy || failed="$$failed mypy"; cat $(VENV)/mypy.txt; \
	echo "--- $$(( $$(date +%s) - start )) s"; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi; echo "all passed"

serve: $(STAMP) ## Serve MODEL, a folder, or else the demonstration model: make serve MODEL=path ARGS=--help
	@$(BIN)/lineclear serve $(if $(MODEL),--model $(MODEL),--demo) $(ARGS)

bench: $(STAMP) ## lineclear and its PEERS in turns on one workload; bench/README.md has the rest
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' bench/environments.sh $(BENCH_HOME) $(PEERS)
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only $(or $(MODEL),llama-110m-shape)
	@$(BIN)/python -m bench.compare lineclear $(PEERS) --home $(BENCH_HOME) --model $(or $(MODEL),llama-110m-shape) \
		--work $(WORK) $(ARGS)

bench-micro: $(STAMP) ## What each part of lineclear costs by itself
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only $(or $(MODEL),llama-110m-shape)
	@$(BIN)/python -m bench.micro --model $(BENCH_HOME)/models/$(or $(MODEL),llama-110m-shape) $(ARGS)

bench-neighbour: $(STAMP) ## Tokens a second beside 0, 1 and 2 busy processes, both models; NEIGHBOUR_PEERS="vllm llama" beside it
	@test -z '$(NEIGHBOUR_PEERS)' || PYTHON='$(PYTHON)' TORCH='$(TORCH)' bench/environments.sh $(BENCH_HOME) $(NEIGHBOUR_PEERS)
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only llama-110m-shape
	@for model in $(BENCH_HOME)/models/llama-110m-shape demo/model; do $(BIN)/python -m bench.neighbour --model $$model \
		--home $(BENCH_HOME) --contenders auto 1 $$(nproc) $(NEIGHBOUR_PEERS) --turns $(or $(TURNS),3) $(ARGS) || exit 1; done

simulation: $(STAMP) ## SEEDS (20,000) simulated histories, half of them under faults to the end, half in peace at last
	@$(BIN)/python tests/simulation/replay.py 0 $(or $(SEEDS),20000) --check

fuzz: $(STAMP) ## 100,000 damaged frames against the decoder and a live link, as many damaged requests against a server
	@cd tests && ../$(BIN)/python -m fuzz.frames --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m fuzz.requests --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m fuzz.requests --cancels 20000

chaos: $(STAMP) ## 3,000 kills of the toy worker under 32 streams, 300 of the scheduler, 90 of the torch worker; 100 updates of the model
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),3000) --parallel 2 --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of scheduler --kills $(or $(KILLS),300) --parallel 2 --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),30) --model ../demo/model
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),30) --model ../demo/model --dtype bfloat16
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),30) --model ../demo/model --standby
	@cd tests && ../$(BIN)/python -m campaigns.rolling --updates $(or $(UPDATES),100) --seed $(or $(SEED),1)

mutants: $(STAMP) ## Plant every listed bug: in the core for the simulation, and for rows of tests/faults.yaml; which are caught?
	@cd tests && ../$(BIN)/python -m simulation.test_mutations
	@cd tests && ../$(BIN)/python -m support.mutants

privacy: $(STAMP) ## Does the time to the first token tell a tenant what another has asked? TRIALS (800) of each worker
	@cd tests && ../$(BIN)/python -m campaigns.privacy --trials $(or $(TRIALS),800) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.privacy --trials $(or $(TRIALS),800) --model ../demo/model

soak: $(STAMP) ## SECONDS (3600) of answers, kills, slow and vanishing clients: is all right, does anything grow?
	@cd tests && ../$(BIN)/python -m campaigns.soak --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

hostile: $(STAMP) ## SECONDS (60) of each kind of hostile caller beside a stream: its gaps, its answers, the server's memory
	@cd tests && ../$(BIN)/python -m campaigns.hostile --seconds $(or $(SECONDS),60) $(if $(MODEL),--model $(MODEL)) $(ARGS)

images: $(STAMP) ## Build both images with BUILDER (podman, docker) and try them: 16 streams while both are stopped at once
	@$(BIN)/python deploy/try_images.py $(if $(BUILDER),--builder $(BUILDER)) -- $(BUILD_FLAGS)

lint: $(STAMP) ## ruff, import-linter and mypy only
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy

format: $(STAMP) ## Rewrite the sources as ruff likes them
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

stubs: $(STAMP) ## Write the Python stubs from protos/**/*.proto
	@$(BIN)/python protos/generate.py && git status --short protos

clean: ## Remove what make and the tools made, .venv too
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an interrupted set-up is taken up again. The pin of torch leaves the constraints because
# TORCH says it. hatchling goes first so that the project is built with the pinned one, outside an isolated download.
# pip compiles nothing, because it would compile all of torch and transformers; a server imports a fraction of them.
$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo "No Python >= 3.11 with the venv module was found. Install one (on Debian or Ubuntu:" \
		"apt install python3 python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON=$(PYTHON) is not a Python >= 3.11 with the venv module."; exit 1; }
	@echo "--- set-up: $(VENV) with $$('$(PYTHON)' --version), once; a minute and more, with the network"
	@$(BIN)/python -c 'import pip' 2>/dev/null || '$(PYTHON)' -m venv --clear $(VENV)
	@sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	@echo "--- set-up: build backend" && $(PIP) hatchling
	@echo "--- set-up: $(TORCH), 0.2 GB for a CPU and some GB with CUDA" && $(PIP) '$(TORCH)'
	@echo "--- set-up: lineclear, its dependencies and the development tools"
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@echo "--- set-up: what a server imports, compiled, so that the first start is as quick as the next"
	@env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX $(BIN)/python -c '$(SERVED)'
	@touch $@ && echo "--- set-up: done"
