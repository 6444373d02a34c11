# `make demo` and `make test` work on a fresh machine: they create .venv if it does not exist. `make demo` installs only
# what a user needs.
PYTHON ?= python3
SEED ?= 0
WORKDIR ?= runs/demo
# LOCKED=1: use a separate environment with the package versions with which the tests last passed, not the newest.
LOCKED ?=
VENV := .venv$(if $(LOCKED),-locked)
BIN := $(VENV)/bin
# --no-compile: compiling all modules of the packages takes longer than the demo's imports compile on first use.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile $(if $(LOCKED),-c tests/lock.txt)
JOBS ?= 2
# Each test file runs in one process, the longest files first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist=loadfile --no-loadscope-reorder
# The environment has what a user needs; it has, in addition, what the tests, linters and documentation need.
USER_STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test
export JAX_PLATFORMS ?= cpu
# Many container images set it: then every program would compile all modules at its start, which takes 5 seconds.
unexport PYTHONDONTWRITEBYTECODE

# Removes WORKDIR only if it is a run directory.
clear = @if [ -e "$(1)" ] && [ ! -f "$(1)/config.json" ]; then \
	echo "$(1): exists and is not a run directory; not removed" >&2; exit 2; fi; rm -rf "$(1)"

.PHONY: demo demo-real controls test test-ci test-all test-real weights-named docs lock lint format clean

# Train the toy policy with GRPO in the closed world and print the changes. Always starts anew; ARGS: more flags.
demo: $(USER_STAMP)
	$(call clear,$(WORKDIR))
	$(BIN)/python launch/train.py --config=configs/smoke.py --config.seed=$(SEED) --workdir=$(WORKDIR) $(ARGS)

# The same run without both bonuses, and without the decomposition bonus, compared with the demo.
controls: $(USER_STAMP)
	$(call clear,$(WORKDIR)-no-bonus)
	$(call clear,$(WORKDIR)-no-decomposition)
	$(BIN)/python launch/train.py --config=configs/smoke.py --config.seed=$(SEED) --workdir=$(WORKDIR)-no-bonus \
		--config.reward.decomposition=0.0 --config.reward.search_count=0.0
	$(BIN)/python launch/train.py --config=configs/smoke.py --config.seed=$(SEED) --workdir=$(WORKDIR)-no-decomposition \
		--config.reward.decomposition=0.0
	$(BIN)/python launch/report.py $(WORKDIR) $(WORKDIR)-no-bonus $(WORKDIR)-no-decomposition

# Train a small real model on questions and passages of the published train.json and dev.json of 2WikiMultiHopQA, which
# are in the directory SETS (docs/small_model.md). Files in REAL that are complete are kept; training resumes.
REAL ?= runs/real
MODEL ?= HuggingFaceTB/SmolLM2-135M-Instruct
TRANSCRIPTS ?= 1500
SMALL := $(BIN)/python launch/
SMALL_RUN = --config=configs/smollm2_135m.py --config.retrieval.index=$(REAL)/index
demo-real: $(REAL)/cold_start/policy $(REAL)/test/questions.json | $(USER_STAMP)
	$(SMALL)train.py $(SMALL_RUN) --config.model.path=$(REAL)/cold_start/policy --config.data.source=$(REAL)/train \
		--workdir=$(REAL)/run $(ARGS)
	@[ $(REAL)/results/run -nt $(REAL)/run/checkpoints ] || rm -rf $(REAL)/results/run  # if it was trained further
	for policy in cold_start run; do $(SMALL)eval.py --model=$(REAL)/$$policy --benchmark=test:$(REAL)/test \
		--index=$(REAL)/index --count=96 --out=$(REAL)/results/$$policy || exit; done

$(REAL)/corpus.jsonl: | $(USER_STAMP)
	@if [ ! -f "$(SETS)/train.json" ] || [ ! -f "$(SETS)/dev.json" ]; then echo "demo-real: SETS=$(SETS): accepted: the" \
		"directory with train.json and dev.json of 2WikiMultiHopQA (docs/small_model.md)" >&2; exit 2; fi
	$(SMALL)prepare_data.py --source=train:$(SETS)/train.json --source=dev:$(SETS)/dev.json --passage_words=24 \
		--corpus_out=$@
$(REAL)/index: | $(REAL)/corpus.jsonl
	$(SMALL)build_index.py --corpus=$(REAL)/corpus.jsonl --encoder=bm25 --out=$@
$(REAL)/train/questions.json: | $(REAL)/corpus.jsonl
	$(SMALL)prepare_data.py --source=train:triples:$(SETS)/train.json --exclude_entities_of=$(SETS)/dev.json \
		--corpus=$(REAL)/corpus.jsonl --sizes=3,4 --questions=1700 --out=$(@D)
$(REAL)/test/questions.json: | $(REAL)/corpus.jsonl
	$(SMALL)prepare_data.py --source=test:triples:$(SETS)/dev.json --corpus=$(REAL)/corpus.jsonl --sizes=3,4 \
		--questions=1000 --out=$(@D)
$(REAL)/transcripts.jsonl: | $(REAL)/index $(REAL)/train/questions.json
	$(SMALL)write_transcripts.py $(SMALL_RUN) --config.model.path=$(MODEL) --questions=$(REAL)/train \
		--count=$(TRANSCRIPTS) --out=$@
$(REAL)/cold_start/policy: | $(REAL)/transcripts.jsonl
	$(SMALL)sft.py $(SMALL_RUN) --config.model.path=$(MODEL) --transcripts=$(REAL)/transcripts.jsonl \
		--workdir=$(REAL)/cold_start

# Fast tests, format, lint, the import contracts and types.
test: lint
	$(PYTEST) -m "not slow and not weekly and not real" tests

# What continuous integration runs: the slow tests too, without the most expensive ones.
test-ci: lint
	$(PYTEST) -m "not weekly and not real" --durations=25 tests

# All tests except those with real weights.
test-all: lint
	$(PYTEST) -m "not real" --durations=25 tests

# Tests with real weights: make test-real PSEARCH_QWEN=DIR (or PSEARCH_SMOLLM2=DIR) [PSEARCH_CORPUS=FILE]. In one
# process, to save memory.
test-real: weights-named $(TEST_STAMP)
	PSEARCH_QWEN="$(PSEARCH_QWEN)" PSEARCH_SMOLLM2="$(PSEARCH_SMOLLM2)" $(BIN)/python -m pytest -n 0 --durations=15 tests/test_real.py

weights-named:
	@if [ -z "$(PSEARCH_QWEN)$(PSEARCH_SMOLLM2)" ]; then echo "test-real: neither PSEARCH_QWEN nor PSEARCH_SMOLLM2" \
		"is set, accepted: a directory with the weights of Qwen2.5-0.5B-Instruct (hf download" \
		"Qwen/Qwen2.5-0.5B-Instruct --local-dir=DIR), or of SmolLM2-135M-Instruct" >&2; exit 2; fi

# The documents as an offline site, site/index.html, after docs/configuration.md is generated from the code.
docs: $(TEST_STAMP)
	$(BIN)/python docs/reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Update tests/lock.txt, for every Python version that setup.py accepts. Needs uv: pip install uv.
lock:
	uv pip compile setup.py --extra=test --universal --python-version=3.11 --no-emit-index-url --no-annotate \
		--no-header --quiet --output-file=tests/lock.txt --upgrade

lint: $(TEST_STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(TEST_STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-locked runs site .pytest_cache .ruff_cache .import_linter_cache *.egg-info

$(USER_STAMP): setup.py $(if $(LOCKED),tests/lock.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(PIP_INSTALL) -e .
	touch $@

$(TEST_STAMP): $(USER_STAMP)
	$(PIP_INSTALL) -e '.[test]'
	touch $@
