# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv the first time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
JOBS   ?= 2

# The PyTorch of `make test-torch`: the newest that is out. constraints.txt pins that of `make test`.
TORCH  ?= 2.15.0

# Each process of pytest-xdist gets a half of the tests, in order, and takes from the other's end: most
# files import their frameworks, start their ranks and make what their tests share once.
PYTEST := $(BIN)/pytest -n $(JOBS) --dist worksteal

# The tests of `make test-simulated`, and those of them that depend on what a device lacks.
SIMULATED  := tests/simulated $(addprefix tests/,scaler autocast master_weights record trace tune diagnose replay watch dtype_errors)
BY_PROFILE := tests/record/test_record.py $(addprefix tests/scaler/test_,guard.py gradients.py loss_scale.py overrides.py) \
	$(addprefix tests/scaler/test_,training.py clipping.py saving.py skips.py)

# Where the environment forbids it, each of the processes that tests start would compile halfstep anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test quick test-torch test-simulated pytest lint check fuzz pairs score quality package gpu test-ranks bench docs clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## make .venv with everything pinned (demo and test do it by themselves)

$(READY): pyproject.toml constraints.txt setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" OTHER_TORCH="$(OTHER_TORCH)" sh setup.sh

demo: $(READY)  ## train a small GPT in fp32, bf16 and fp16 and compare; ARGS="--steps 100" for less
	@$(BIN)/python examples/train_text.py $(ARGS)

check: lint  ## lint, format, the direction of imports, the sizes of limits.toml, and types
	$(BIN)/mypy

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/python benchmarks/code_counts.py --check

# Types, cold, take one core most of a minute: beside the tests, which have an idle one at their end.
test: lint  ## what check does, and all tests that need no GPU
	@$(BIN)/mypy >$(VENV)/mypy.log 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory pytest; tests=$$?; \
	wait $$types; types=$$?; cat $(VENV)/mypy.log; exit $$((tests || types))

quick: check  ## check, then the tests that find most in two minutes
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

test-torch:  ## all tests in a .venv of their own: [TORCH=2.15.0] [PYTHON=python3.13]
	@$(MAKE) --no-print-directory pytest OTHER_TORCH=$(TORCH) \
		VENV=.venv-torch-$(TORCH)$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))

pytest: $(READY)
	$(PYTEST) -m "not gpu" $(ARGS)

fuzz: $(READY)  ## 20,000 random sequences of calls of the scaler, and all injected faults (make test runs a share of them)
	HALFSTEP_FUZZ=20000 $(BIN)/pytest tests/scaler/test_fuzz.py tests/diagnose/test_faults.py $(ARGS)

pairs: $(READY)  ## our own features in all 3,600 pairs (make test runs a share of them)
	HALFSTEP_PAIRS=all $(PYTEST) tests/test_pairs.py $(ARGS)

score: $(READY)  ## diagnose 286 injected faults, 200 clean steps, 500 small programs, 197 errors about dtypes, 48 formulas, 219 whole runs, 20 long clean runs (half an hour)
	$(BIN)/python -m tests.diagnose.score $(ARGS)

quality: $(READY)  ## final losses of seven precisions (an hour); ARGS="--only digits --seeds 2" for less
	@$(BIN)/python benchmarks/quality.py $(ARGS)

package:  ## build dist/ and check it as PyPI would, in a .venv of its own
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/pip install -q build twine
	rm -rf dist
	.venv-package/bin/python -m build
	.venv-package/bin/twine check --strict dist/*

test-simulated: $(READY)  ## the tests that take a device, on a simulated one, with what real ones lack
	$(PYTEST) -q -m "not gpu and not slow" --device sim:cuda $(SIMULATED) $(ARGS)
	@$(MAKE) --no-print-directory -j $(JOBS) simulated-mps simulated-xpu_arc simulated-plain simulated-slow

# Usual steps depend on who moves the scale, and on how late the host reads.
simulated-mps simulated-slow: BY_PROFILE += tests/scaler/test_usual.py

simulated-%:  # few tests: one process each
	$(BIN)/pytest -q -m "not gpu and not slow" --device sim:$* $(BY_PROFILE) $(ARGS)

gpu: $(READY)  ## what needs a GPU: times beside torch.amp, counts, tests; writes docs/gpu.md
	$(BIN)/python benchmarks/gpu.py $(ARGS)

test-ranks: $(READY)  ## the tests with four ranks, on the CPU
	$(BIN)/pytest -m ranks4 $(ARGS)

bench: $(READY)  ## the published figures (benchmarks/README.md)
	$(BIN)/python benchmarks/code_counts.py
	$(BIN)/python benchmarks/accelerator_ops.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/step_calls.py
	$(BIN)/python benchmarks/step_time.py --compile --rounds 16
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/cache_time.py
	$(BIN)/python benchmarks/gradient_time.py
	$(BIN)/python benchmarks/reductions.py
	$(BIN)/python benchmarks/float32_head.py
	$(BIN)/python benchmarks/scale_schedules.py
	$(BIN)/python benchmarks/record_time.py
	$(BIN)/python benchmarks/diagnose_time.py --size small
	$(BIN)/python benchmarks/diagnose_time.py --size 43m --dtype bf16
	$(BIN)/python benchmarks/ranks_counts.py
	$(BIN)/python benchmarks/ranks_cost.py
	$(BIN)/python benchmarks/half_parameters.py
	$(BIN)/python benchmarks/architectures.py

docs: $(READY)  ## the site, docs/_build/html/index.html; a warning or a failing example is an error
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html
	$(PYTEST) -q tests/test_docs.py tests/test_notebook.py tests/test_errors_page.py

clean:  ## remove .venv and caches
	rm -rf docs/_build docs/cookbook docs/ten_minutes.ipynb $(VENV) .venv-package .venv-torch-* .hypothesis .mypy_cache .pytest_cache .ruff_cache
