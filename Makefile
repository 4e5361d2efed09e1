# PYTHON chooses the interpreter (and so the environment) that every target uses: make test PYTHON=.venv/bin/python
PYTHON ?= python

# A test run starts a hundred processes. Where this is set, each of them compiles torch, transformers and kvbench again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup model suite lowest exhaustive format style types docs size site findings composition formats shipped test roundtrip hostile test-code test-degenerate test-exact test-killed test-arm test-bytes test-launchers test-gpu gpu fuzz mutants simulate smoke clean

help: ## show the targets; `make` alone does too
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | \
	awk -F'|' '{ printf "  make %-15s ", $$1; n = split($$2, words, " "); used = 23; \
	for (i = 1; i <= n; i++) { if (used + length(words[i]) > 79) { printf "\n%23s", ""; used = 23 } \
	printf "%s ", words[i]; used += length(words[i]) + 1 }; print "" }'

setup: ## install kvbench and its test tools into the environment of $(PYTHON)
	$(PYTHON) -m pip install --quiet --editable '.[test]'

# Both builds that the default tests run, so that no test's time is a compiler's; without a compiler they are skipped.
model: ## fetch and convert the embedded model and compile the CPU kernels, once (cached outside the repository)
	$(PYTHON) -c "from kvbench.models.embedded import ensure_embedded; ensure_embedded()"
	for isa in auto portable; do KVBENCH_CPU_ISA=$$isa $(PYTHON) -c "from kvbench.kernels.cpu.abi import load; load()" || true; done

format: ## rewrite the code to the house format
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

style: types ## check the format, the rules and the types without changing anything
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: ## check the types
	$(PYTHON) -m mypy -p kvbench

docs: ## write the documents that are generated from the code
	$(PYTHON) -m kvbench.cli.method_table > docs/reference/methods.md
	$(PYTHON) -m kvbench.cli.settings_table > docs/reference/settings.md
	$(PYTHON) -m kvbench.cli.error_table > docs/reference/errors.md
	$(PYTHON) -m kvbench.extensions.papers.tables > kvbench/extensions/papers/tables.md
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/decoders.py > docs/reference/models.md

size: ## lines and code lines of each room of the core and of each extension, and words of documents by kind
	PYTHONPATH=$(CURDIR)/tests $(PYTHON) tests/size.py

site: ## build the documents as a site with search and the Python reference, into build/site
	$(PYTHON) -m pip install --quiet '.[docs]'
	rm -rf build/pages && mkdir -p build/pages
	for part in README.md CONTRIBUTING.md CHANGELOG.md LICENSE docs results notebooks; do ln -s ../../$$part build/pages/$$part; done
	mkdir -p build/pages/kvbench && ln -s ../../../kvbench/extensions build/pages/kvbench/extensions
	$(PYTHON) -m mkdocs build --quiet

findings: ## make the tables and pictures of the findings again from their samples (minutes)
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/findings.py
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/benchmarks.py
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/mission_report.py

FOLDER ?= composition
composition: ## which score with which allocation at equal bytes, every combination at three budgets, into FOLDER (hours)
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/composition.py $(FOLDER)

formats: ## what each storage format loses at which bytes, as it is and rotated, into FOLDER (an hour)
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/formats.py $(FOLDER)

shipped: ## what the formats of llama.cpp, vLLM and SGLang lose on running text, into FOLDER (25 minutes)
	PYTHONPATH=$(CURDIR) $(PYTHON) results/example/shipped.py $(FOLDER)

test: setup model ## install, fetch the embedded model, run the default tests in one process more than there are cores, at most 4 (each takes up to 3 GB)
	@$(MAKE) --no-print-directory suite

# One process more than there are cores: some tests sleep until a limit ends them, and some wait for the disk.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, 1 + (os.cpu_count() or 1)))")
PYTEST = $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal
suite: ## run the default tests, where `make setup` was done; fail where one takes over 5 s of a processor
	$(PYTEST) --slowest 20

exhaustive: ## run the tests that are marked `exhaustive` too: full products, all instruction sets, simulations, kills, hostile programs, the core without each extension (some hours)
	$(PYTEST) -m ""

# Triton's interpreter needs 3.7 with the newest numpy; the lowest torch has 3.6, which works with the lowest numpy.
LOWEST = build/lowest
lowest: ## run the default tests once on the lowest releases that pyproject.toml allows, in build/lowest (needs uv; 4 GB)
	uv venv --quiet --allow-existing --python $(PYTHON) $(LOWEST)
	echo "triton>=3.6; platform_system == 'Linux'" > $(LOWEST)/override.txt
	uv pip install --quiet --python $(LOWEST) --resolution lowest-direct --override $(LOWEST)/override.txt -e '.[test]'
	@$(MAKE) --no-print-directory model suite PYTHON=$(LOWEST)/bin/python

ROUNDTRIPS ?= 300
roundtrip: ## random valid settings through a run and everything that reads it (long, not timed; ROUNDTRIPS=300)
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/roundtrip.py $(ROUNDTRIPS)

HOSTILE ?= 300
hostile: ## random hostile input from SEED on: tampered folders, models, templates, methods, rows, files, paths, settings (long, not timed; HOSTILE=300)
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests:$(CURDIR)/tests/runs OMP_NUM_THREADS=1 $(PYTHON) -m hostile.trials $(HOSTILE) --seed $(SEED) $(if $(ONLY),--only $(ONLY))

test-code: setup ## every reference of HumanEval+ and MBPP+, mutants, and every hostile program in the cage (needs the EvalPlus files; minutes)
	$(PYTHON) -m pytest -q -m "" -s tests/tasks/code/test_cage*.py tests/tasks/code/test_grade_data.py

test-degenerate: setup ## 10,000 degenerate answers through every grader, and texts of a million characters (minutes)
	KVBENCH_DEGENERATE=1 $(PYTHON) -m pytest -q tests/tasks/test_degenerate_answers.py

test-exact: setup model ## 2,032 tokens of the embedded model step by step beside its exact logits (minutes)
	$(PYTHON) -m pytest -q -m "" tests/engine/test_invariants.py -k step_by_step

# How many kills; an hour has a thousand.
KVBENCH_KILLS ?= 100
test-killed: setup ## kill and disturb sweeps, builds and the model's conversion; compare with unbroken ones (KVBENCH_KILLS=100: minutes)
	KVBENCH_KILLS=$(KVBENCH_KILLS) $(PYTHON) -m pytest -q -m "" -s tests/runs/test_killed_sweep.py

test-arm: setup ## the C++ kernels compiled for 64-bit ARM and emulated (needs g++-aarch64-linux-gnu and qemu-user; half a minute)
	command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64
	$(PYTHON) -m pytest -q -m "" tests/kernels/cpu/test_other_cpu.py

test-bytes: setup ## compare projected bytes with those that SmolLM2-135M really holds, every method at three lengths (minutes)
	$(PYTHON) -m pytest -q -m "" tests/sizing/test_project.py

test-launchers: setup ## sweeps and shards under joblib, Slurm's local stand-in and Ray: same samples, kills, exit codes (minutes)
	$(PYTHON) -m pip install -q '.[cluster]'
	$(PYTHON) -m pytest -q -m "" tests/cli/test_launchers.py tests/extensions/cluster/tests/test_suite_shared.py

test-gpu: setup ## every method in every case on interpreted Triton kernels, or on a GPU where there is one (half an hour without)
	$(PYTHON) -m pytest -q -m "" tests/extensions/bench/tests/test_check_methods.py tests/kernels/gpu

GPU_MINUTES ?= 9
gpu: ## stages of the evidence on a GPU that are not done yet, as many as fit into GPU_MINUTES; again goes on (needs torch, triton and transformers alone)
	$(PYTHON) -m kvbench.extensions.bench.evidence_gpu --minutes $(GPU_MINUTES)

CASES ?= 300
SEED ?= 0
ISA ?= portable
fuzz: setup ## CASES random calls of the C++ kernels from SEED on, right and wrong ones, under GCC's sanitizers (ISA: which build; a minute)
	PYTHONPATH=$(CURDIR)/tests $(PYTHON) tests/kernels/cpu/kernel_fuzz.py sanitize=$(ISA) cases=$(CASES) seed=$(SEED)

mutants: setup model ## change methods, policy and cache in 200 random spots and say which changes no test notices (an hour and more)
	$(PYTHON) tests/mutants.py number=200 seed=0 at_least=0.95

TABLES ?= 1000
simulate: setup ## how often verdicts are wrong and intervals miss, by simulation (TABLES=1000: an hour or more)
	PYTHONPATH=$(CURDIR) $(PYTHON) tests/evidence/verdict_simulation.py trials=$(TABLES)

smoke: ## one short experiment of every part, on the embedded model
	$(PYTHON) -m kvbench method=diffkv task=longctx limit=1

clean: ## remove what builds and tests leave in the repository (never results/ or cached models)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis outputs multirun
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
