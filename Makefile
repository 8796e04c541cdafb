# Commands of this project; `make help` lists them.
#
# Each target first makes `.venv` with the versions of `constraints.txt`, unless it exists. pip's own configuration and
# PIP_* variables choose the package index.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/ready

# The first of these that runs, is new enough and can make a virtual environment.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# The requirement for PyTorch: a version, a local version such as torch==2.13.0+cu130, or the path of a wheel.
TORCH ?= $(shell sed -n '/^torch==/p' constraints.txt)

# Peers and workload of `make bench`, and the folder for the peers' environments and the models.
PEERS ?= transformers
WORK ?= w1
BENCH_HOME ?= build/bench

# Test processes at a time, for two cores: many tests wait. Tests of one file stay in one process, in order.
JOBS ?= 3
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --constraint $(VENV)/constraints.txt

# Modules to compile at set-up, by importing them.
SERVED := import lineclear.scheduler.app, lineclear.worker.app, lineclear.worker.runner.runner_factory, lineclear.cli.app

.PHONY: help demo test test-slow test-exhaustive serve bench bench-micro bench-gpu gpu-dry-run bench-neighbour browser-test examples simulation fuzz chaos mutants privacy soak hostile images release docs lint size format stubs baseline alerts clean ready
.DEFAULT_GOAL := help

help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile
	@echo "Variables: PYTHON (an interpreter >= 3.11), TORCH (what pip installs as PyTorch), JOBS (test processes),"
	@echo "MODEL, PEERS (see bench/environments.sh), WORK (w1 to w5) and BENCH_HOME (environments and models) of bench"

demo: ready ## Serve the demo model, stream prompts, and compare with static batching
	@$(BIN)/python demo/run.py $(ARGS)

# Bytecode is written also where the environment says otherwise, as in many containers: the tests start hundreds of
# processes, and each would compile its modules again.
TEST_ENVIRONMENT := export OMP_NUM_THREADS=1; unset PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX
PYTEST := python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: ready ## Run ruff, import-linter, mypy, and pytest without the slow tests
	@start=$$(date +%s); failed=; $(TEST_ENVIRONMENT); \
	$(BIN)/python -m mypy >$(VENV)/mypy.txt 2>&1 & mypy=$$!; \
	for step in 'ruff check .' 'ruff format --check .' lint-imports '$(PYTEST) -m "not (slow or exhaustive)"'; do \
		echo "--- $$step"; eval "$(BIN)/$$step" || failed="$$failed '$$step'"; \
	done; \
	echo "--- mypy, in parallel"; wait $$mypy || failed="$$failed mypy"; cat $(VENV)/mypy.txt; \
	echo "--- $$(( $$(date +%s) - start )) s"; \
	if [ -n "$$failed" ]; then echo "FAILED:$$failed"; exit 1; fi; echo "all passed"

test-slow: ready ## Run the slow tests: campaigns, fuzzing, wire faults, other processors
	@start=$$(date +%s); failed=; $(TEST_ENVIRONMENT); $(BIN)/$(PYTEST) -m "slow and not exhaustive" || failed=1; \
	echo "--- $$(( $$(date +%s) - start )) s"; test -z "$$failed"

test-exhaustive: ready ## Run the tests of further model families, which CI leaves out
	@$(TEST_ENVIRONMENT); $(BIN)/$(PYTEST) -m exhaustive

alerts: ready ## Fire each alert of deploy/monitoring by a real fault, with a real Prometheus (apt-get install prometheus)
	@$(TEST_ENVIRONMENT); $(BIN)/python -m pytest -q -rs tests/deploy/test_alerts_fire.py

serve: ready ## Serve the model directory MODEL, by default the demo model: make serve MODEL=path ARGS=--help
	@$(BIN)/lineclear serve $(if $(MODEL),--model $(MODEL),--demo) $(ARGS)

bench: ready ## Compare lineclear and PEERS on one workload, in turns; see bench/README.md
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' bench/environments.sh $(BENCH_HOME) $(PEERS)
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only $(or $(MODEL),llama-110m-shape)
	@$(BIN)/python -m bench.compare lineclear $(PEERS) --home $(BENCH_HOME) --model $(or $(MODEL),llama-110m-shape) \
		--work $(WORK) $(ARGS)

bench-micro: ready ## Measure the parts of lineclear by themselves
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only $(or $(MODEL),llama-110m-shape)
	@$(BIN)/python -m bench.micro --model $(BENCH_HOME)/models/$(or $(MODEL),llama-110m-shape) $(ARGS)

# No `ready`: it needs a network, and a machine with a GPU may have none.
GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)

bench-gpu: ## All that is measured on a GPU, in nine minutes without a network, with GPU_PYTHON; DEVICE=cpu rehearses it
	@$(GPU_PYTHON) -m bench.gpu --device $(or $(DEVICE),cuda) $(ARGS)

CUDA_TORCH := build/cuda-torch

gpu-dry-run: ready ## Run the worker's steps on fake CUDA tensors, without a GPU; installs torch for CUDA, 4.5 GB, into build/
	@test -e $(CUDA_TORCH)/torch || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile \
		--target $(CUDA_TORCH) "torch===$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)"
	@export PYTHONPATH=$(CUDA_TORCH) OMP_NUM_THREADS=1; \
		$(BIN)/python -c 'import torch; assert torch.backends.cuda.is_built(), torch.__version__' && \
		$(BIN)/python -m pytest -q tests/worker/test_dry_run.py

bench-neighbour: ready ## Tokens a second beside 0, 1 and 2 busy processes; NEIGHBOUR_PEERS="vllm llama" to compare
	@test -z '$(NEIGHBOUR_PEERS)' || PYTHON='$(PYTHON)' TORCH='$(TORCH)' bench/environments.sh $(BENCH_HOME) $(NEIGHBOUR_PEERS)
	@$(BIN)/python -m bench.models --out $(BENCH_HOME)/models --only llama-110m-shape
	@for model in $(BENCH_HOME)/models/llama-110m-shape demo/model; do $(BIN)/python -m bench.neighbour --model $$model \
		--home $(BENCH_HOME) --contenders auto 1 $$(nproc) $(NEIGHBOUR_PEERS) --turns $(or $(TURNS),3) $(ARGS) || exit 1; done

browser-test: ready ## Test the status page in a headless Chromium; IMAGES=FOLDER for screenshots, CHROMIUM=program
	@test -n "$$(command -v $(or $(CHROMIUM),chromium chromium-browser google-chrome))" || { echo "No Chromium was found." \
		"Install one (on Debian or Ubuntu: apt install chromium), or name it: make browser-test CHROMIUM=/path/to/chrome"; exit 1; }
	@STATUS_IMAGES=$(if $(IMAGES),$(abspath $(IMAGES))) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/observe/test_status_page.py

examples: ready ## Build and run the examples in other languages whose toolchain is installed; the others are listed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rs tests/examples

simulation: ready ## Simulate SEEDS (20,000) histories, half with faults to the end, half without at the end
	@$(BIN)/python tests/simulation/replay.py 0 $(or $(SEEDS),20000) --check

fuzz: ready ## Send 100,000 damaged frames to decoder and link, as many damaged requests to a server, and read as many model files
	@cd tests && ../$(BIN)/python -m fuzz.frames --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m fuzz.requests --count $(or $(COUNT),100000) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m fuzz.requests --cancels 20000
	@cd tests && ../$(BIN)/python -m fuzz.model_files --count $(or $(COUNT),100000) --seed $(or $(SEED),1)

chaos: ready ## Kill workers and schedulers under load, and update the model
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),3000) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),500) --num-workers 2 --streams 32 --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of scheduler --kills $(or $(KILLS),300) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),100) --model ../demo/model --streams 8 --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),30) --model ../demo/model --streams 8 --standby
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of worker --kills $(or $(KILLS),30) --model ../demo/model --tensor-parallel-size 2
	@cd tests && ../$(BIN)/python -m campaigns.chaos --of scheduler --kills $(or $(KILLS),30) --model ../demo/model --streams 8
	@cd tests && for format in '--dtype float32' '--dtype bfloat16' '--quantization int8 --kv-cache-dtype int8'; do \
		../$(BIN)/python -m campaigns.chaos --model ../demo/model-tiny --kills $(or $(KILLS),20) --answers 1000 \
		--server-flags '--target-batch-tokens 48' --worker-flags "$$format --deterministic" || exit 1; done
	@cd tests && ../$(BIN)/python -m campaigns.rolling --updates $(or $(UPDATES),100) --seed $(or $(SEED),1)

mutants: ready ## Plant each listed bug, and COUNT (100) mutants drawn at random, and check that tests fail
	@cd tests && ../$(BIN)/python -m simulation.test_mutations
	@cd tests && ../$(BIN)/python -m campaigns.mutation --listed
	@cd tests && ../$(BIN)/python -m campaigns.mutation --count $(or $(COUNT),100) --seed $(or $(SEED),1)

privacy: ready ## Test whether response times reveal another tenant's prompts; TRIALS (800) with each worker
	@cd tests && ../$(BIN)/python -m campaigns.privacy --trials $(or $(TRIALS),800) --seed $(or $(SEED),1)
	@cd tests && ../$(BIN)/python -m campaigns.privacy --trials $(or $(TRIALS),800) --model ../demo/model

soak: ready ## Run SECONDS (3600) of load, kills, slow and lost clients, and check answers and memory
	@cd tests && ../$(BIN)/python -m campaigns.soak --seconds $(or $(SECONDS),3600) --seed $(or $(SEED),1)

hostile: ready ## Run SECONDS (60) of each kind of hostile client beside a stream
	@cd tests && ../$(BIN)/python -m campaigns.hostile --seconds $(or $(SECONDS),60) $(if $(MODEL),--model $(MODEL)) $(ARGS)

images: ready ## Build both images with BUILDER (podman, docker) and test them with 16 streams, or an upgrade from PREVIOUS, a commit
	@$(BIN)/python deploy/try_images.py $(if $(BUILDER),--builder $(BUILDER)) $(if $(PREVIOUS),--previous $(PREVIOUS)) -- $(BUILD_FLAGS)

release: ready ## Build sdist, wheels, SBOM, licences and sums into dist/, twice, and use each: all but the upload
	@$(BIN)/python deploy/release.py

docs: ready ## Build the pages as a site into build/site, and check their links; with search, no network needed to read it
	@$(BIN)/python -c 'import material' 2>/dev/null || $(PIP) mkdocs-material
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build && echo "Read it at http://127.0.0.1:8001: $(BIN)/python -m http.server -b 127.0.0.1 -d build/site 8001"

lint: ready ## ruff, import-linter, mypy and the budgets of tests/size.yaml only
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy && \
		$(BIN)/python -m pytest -q tests/test_size.py

size: ready ## Lines of each root, beside those of the last release and the budget
	@$(BIN)/python tests/test_size.py

format: ready ## Format the sources with ruff
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

stubs: ready ## Generate the Python stubs from the .proto files
	@$(BIN)/python protos/generate.py && git status --short protos

baseline: ready ## Make today's public API the baseline of `buf breaking`
	@npx --yes @bufbuild/buf build protos --exclude-source-info -o protos/baseline.binpb

clean: ## Remove .venv and all caches and builds
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Every run writes the generated client anew, in milliseconds, so a clone that was set up before a `git pull` has it.
ready: $(STAMP)
	@$(BIN)/python client/generate_sources.py

# The stamp is written last, so that an interrupted set-up is repeated. TORCH replaces the pin of torch. hatchling is
# installed first, so that the project is built with the pinned version, without build isolation. pip does not compile,
# because a server imports only a fraction of torch and transformers. Triton lies beside the packages: torch imports it
# from there.
$(STAMP): pyproject.toml constraints.txt
	@test -n '$(PYTHON)' || { echo "No Python >= 3.11 with the venv module was found. Install one (on Debian or Ubuntu:" \
		"apt install python3 python3-venv), or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "PYTHON=$(PYTHON) is not a Python >= 3.11 with the venv module."; exit 1; }
	@echo "--- set-up: $(VENV) with $$('$(PYTHON)' --version), once; a minute and more, with the network"
	@$(BIN)/python -c 'import pip' 2>/dev/null || '$(PYTHON)' -m venv --clear $(VENV)
	@sed '/^torch==/d' constraints.txt > $(VENV)/constraints.txt
	@echo "--- set-up: build backend" && $(PIP) hatchling
	@echo "--- set-up: $(TORCH), 0.2 GB for a CPU and some GB with CUDA; and Triton, for the tests of the GPU kernels"
	@$(PIP) --no-deps --target $(VENV)/triton "$$(sed -n '/^triton==/p' constraints.txt)" & triton=$$!; \
		$(PIP) '$(TORCH)' && echo "--- set-up: lineclear, its dependencies and the development tools" && \
		$(PIP) --no-build-isolation --editable '.[dev]'; code=$$?; wait $$triton && exit $$code
	@echo "--- set-up: compiling the modules of a server"
	@env -u PYTHONDONTWRITEBYTECODE -u PYTHONPYCACHEPREFIX $(BIN)/python -c '$(SERVED)'
	@touch $@ && echo "--- set-up: done"
