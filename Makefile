# Every target sets up .venv first; when it is ready, that takes a fraction of a second.
# CONFIG=recipe.yaml (or JSON, or a name in workflows/recipes) goes to --config; EXTRA=cpu or gpu chooses what .venv is for; by default it
# stays what it is, and a new one is for GPUs where nvidia-smi lists one.
EXTRA ?=
CONFIG ?=
ARGUMENTS ?=
ROWS ?=
N ?= 10
PYTHON312 ?= python3.12
# Tests and stages start interpreters by the dozen: each would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE
bin := .venv/bin
# A recipe of workflows/recipes may be given by its name.
config = $(if $(CONFIG),--config '$(or $(wildcard workflows/recipes/$(CONFIG).yaml),$(CONFIG))')

# Settings of a recipe are lower-case; make would take them for variables and ignore them.
letters := a b c d e f g h i j k l m n o p q r s t u v w x y z
given := $(foreach name,$(filter-out bin,$(filter $(addsuffix %,$(letters)),$(.VARIABLES))),$(if $(filter command,$(origin $(name))),$(name)))
ifneq ($(strip $(given)),)
$(error make takes no settings of a recipe, such as $(firstword $(given)); give them to nemo-rl: $(bin)/nemo-rl run grpo $(firstword $(given))=$($(firstword $(given))))
endif

.DEFAULT_GOAL := help
.PHONY: help setup grpo sft dpo reward-model ppo distill post-train sweep evaluate regression smollm2 package register cluster-check images test coverage bench test-changed test-ci-slow test-slow test-experimental test-gpu test-verifiers test-agent-clients test-flyte2 test-float8 test-megatron-bridge test-kubernetes test-slurm test-bare parity graders mutants docs docs-serve lint format lock check-gpu clean

help: ##> This list
	@list() { sed -n "s/^\\([a-z0-9 -]*\\):.*$$1 /\\1\\t/p" Makefile | while IFS='	' read -r name text; do \
	  printf '  make %-20s  %s\n' "$$name" "$$text"; done; }; \
	  echo 'To use it (or .venv/bin/nemo-rl --help):'; list '##>'; echo 'To work on it:'; list '##'

setup: ##> Make .venv, with the pinned requirements
	@bash deployment/setup.sh $(EXTRA)

grpo: setup ##> Run the main job, or CONFIG=recipe.yaml
	$(bin)/pyflyte run workflows/grpo.py grpo $(config)

sft dpo reward-model ppo distill post-train: setup ##> Run another pipeline
	$(bin)/pyflyte run workflows/$(subst -,_,$@).py $(subst -,_,$@) $(config)

sweep: setup ##> Run GRPO over seeds and learning rates
	$(bin)/pyflyte run workflows/sweep.py sweep $(config)

evaluate: setup ##> Measure a model, or compare two
	$(bin)/pyflyte run workflows/evaluate.py evaluate_model $(config)

regression: setup ##> Fail if a model is worse than its baseline
	$(bin)/pyflyte run workflows/regression.py check_regression $(config)

cluster-check: setup ##> Check a Flyte cluster (CONFIG=flyte.yaml)
	$(bin)/nemo-rl cluster-check $(if $(CONFIG),--flyte-config '$(CONFIG)') $(ARGUMENTS)

smollm2: setup ##> Run GRPO on SmolLM2-135M-Instruct
	$(bin)/pyflyte run workflows/grpo.py grpo --config workflows/recipes/grpo_smollm2.yaml

test: setup ## Run the fast tests, and bound their CPU time
	$(bin)/python tests/benchmarks/machine.py 1300 \
	  $(bin)/pytest -n 2 --no-loadscope-reorder -m 'not slow and not gpu'

test-ci-slow: setup ## Run the slow tests of CI, and bound their CPU time
	$(bin)/python tests/benchmarks/machine.py 5000 \
	  $(bin)/pytest -n 2 --no-loadscope-reorder --durations 40 \
	    -m 'slow and not thorough and not gpu'

coverage: setup ## Run the tests of CI with coverage, at least 85 %
	$(bin)/pytest -n 2 --no-loadscope-reorder -m 'not thorough and not gpu' \
	  --cov --cov-report=term:skip-covered --cov-fail-under=85

test-changed: setup ## Run fast tests of a change (BASE=HEAD, SLOW=1)
	@files=$$($(bin)/python -m tests.changed $(BASE)) && if [ -n "$$files" ]; then \
	  $(bin)/pytest -m '$(if $(SLOW),not gpu,not slow and not gpu)' $$files; \
	else echo 'no test reaches what has changed'; fi

bench: setup ## Compare with TRL (ROWS="dpo_step sft", N=10)
	$(bin)/python -m tests.benchmarks.comparison $(ROWS) --n $(N)

parity: setup ## Compare both training backends, by layout
	$(bin)/pytest --no-cov -m slow -s tests/unit/backends/test_parity.py

graders: setup ## Count the right verdicts of the graders, by kind
	$(bin)/python -m tests.graders

mutants: setup ## Count faults that fast tests notice (ONLY=path)
	$(bin)/python -m tests.mutants $(ONLY)

test-slow: setup ## Run all slow tests, also those not in CI
	$(bin)/pytest -n 2 --no-loadscope-reorder --durations 40 -m 'slow and not gpu'
	@$(bin)/python tests/benchmarks/machine.py

test-experimental: setup ## Run the tests of code that only met fakes
	$(bin)/pytest -n 2 -m 'experimental and not gpu'

test-gpu: setup ## Run what one GPU must show (needs EXTRA=gpu)
	$(bin)/pytest -n 0 -v -m gpu tests/gpu

test-verifiers: setup ## Test verifiers in isolated workers
	$(bin)/pytest -n 0 --no-cov -k verifiers tests/workflows/test_isolated_components.py

test-agent-clients: setup ## Test other packages as agents (needs PYTHON312)
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  for each in 'verifiers==0.4.0 uv' openenv==0.10.0 nemo-gym==0.4.0; do \
	    site="$$folder/$${each%%==*}"; \
	    $(PYTHON312) -m venv "$$site" && "$$site/bin/pip" install -q $$each || exit 1; done && \
	  AGENT_CLIENTS="$$folder" $(bin)/pytest -n 0 --no-cov -rs tests/unit/agents/test_packages.py

test-flyte2: setup ## Import the workflows under Flyte 2
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	  $(bin)/python -m pip install -q --no-deps --target "$$site" -r deployment/requirements/flyte2.txt && \
	  PYTHONPATH="$$site" $(bin)/pytest -n 0 --no-cov tests/workflows/test_flyte2.py

test-float8: setup ## Test training in float8, with torchao
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	  $(bin)/python -m pip install -q --no-deps --target "$$site" \
	    "$$(grep '^torchao==' deployment/requirements/gpu.txt)" && \
	  PYTHONPATH="$$site" $(bin)/pytest -n 0 --no-cov tests/unit/backends/test_float8*.py tests/unit/planning/test_planned_float8.py

test-megatron-bridge: setup ## Test the adapter of Megatron-Bridge
	@site=$$(mktemp -d) && trap 'rm -rf "$$site"' EXIT && \
	  $(bin)/python -m pip install -q --no-deps --target "$$site" -r deployment/requirements/megatron_bridge.txt && \
	  PYTHONPATH="$$site" $(bin)/pytest -n 0 --no-cov tests/unit/backends/megatron/test_megatron_bridge_package.py

test-kubernetes: setup ## Test manifests and RayJobs (needs root)
	$(bin)/pytest -n 0 --no-cov -rs -m slow tests/workflows/test_kubernetes.py tests/workflows/test_kuberay.py

test-slurm: setup ## Test runs under Slurm (needs root, slurm-wlm)
	$(bin)/pytest -n 0 --no-cov -rs -m thorough tests/workflows/test_slurm.py

test-bare: ## Run a recipe on a bare Debian (needs root)
	bash tests/bare_debian.sh

package: setup ##> Write what Flyte would get to build/flow.tgz
	@mkdir -p build
	bash deployment/register.sh --package build/flow.tgz

register: setup ##> Register all on Flyte (CONFIG=flyte.yaml)
	bash deployment/register.sh --config '$(CONFIG)' $(ARGUMENTS)

images: setup ##> Build the images of the stages, and push them
	bash deployment/images/build.sh

# Not --quiet, with which mkdocs counts no warnings. The variable leaves out a note on its successor.
docs: setup ## Build the documentation; a warning fails
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build

docs-serve: setup ## Serve the documentation on 127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs serve

lint: setup ## Check style, types and the layers
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/mypy
	$(bin)/lint-imports

format: setup ## Rewrite the sources in the project's style
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

lock: setup ## Pin the requirements again
	bash deployment/requirements/lock.sh

check-gpu: setup ## Install and import the lock for GPUs (10 GB)
	bash deployment/requirements/check_gpu.sh

clean: ## Remove .venv and caches; the store stays
	rm -rf .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache \
	  .import_linter_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
