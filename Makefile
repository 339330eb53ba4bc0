# make demo           trains on the bundled digits with and without a detector, compares
#                     both
# make test           runs the tests
# make check          runs formatter, linter and type checker
# make faults         injects faults for ten minutes
# make seeded-faults  puts twenty faults, one at a time, into a copy of the source and runs the
#                     tests that should notice
# make gpu-check      generates Triton for every loss, compiles it for sm_80 and sm_90, and runs it
#                     in Triton's interpreter; needs no GPU
# Every target sets up what it needs, from Python 3.10 or later and make alone. `make PYTHON=...`
# chooses the interpreter.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers/.installed
RUN := runs/demo
BENCHMARKS := import_time overhead thresholds queues clustering rcl audit
SIDE_BY_SIDE := views losses bimodal loader
INSTALL := pip --disable-pip-version-check install --quiet --constraint constraints.txt
PIP := $(BIN)/python -m $(INSTALL)

.PHONY: install demo test gpu-check faults seeded-faults check format bench docs clean

install: $(STAMP)

$(BIN)/python:
	@for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.10 python; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); \
	    echo "$$python cannot make a virtual environment; try: apt install python3-venv" >&2; \
	    exit 1; \
	  fi; \
	done; \
	echo "No Python 3.10 or later found; name one with \`make PYTHON=/path/to/python3\`" >&2; exit 1

# torch and the build tools come first, so that their versions are those of constraints.txt, in the
# build too.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing kinfolk into $(VENV) (a few minutes the first time)"
	@$(PIP) torch hatchling editables
	@$(PIP) --no-build-isolation --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/kinfolk train --recipe demo-digits --method sogclr --out $(RUN)-base \
	  --overwrite --no-report
	@$(BIN)/kinfolk train --recipe demo-digits --out $(RUN) --overwrite --no-report
	@for run in $(RUN)-base $(RUN); do \
	  $(BIN)/kinfolk eval $$run --protocol knn,linear && $(BIN)/kinfolk report $$run || exit 1; \
	done
	@$(BIN)/kinfolk compare $(RUN)-base $(RUN) --figure knn --out $(RUN)/compare.html --overwrite
	@$(BIN)/python examples/demo_table.py $(RUN)-base $(RUN)

# Two processes with one thread each: most tests are too small for two threads. The byte code is
# kept, whatever the environment says: pytest takes ten seconds to compile all tests anew.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Triton is no dependency, so it has its own environment. About half an hour on two cores; the
# worst figures stand at the end.
.venv-gpu/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing kinfolk and Triton into .venv-gpu"
	@$(BIN)/python -m venv .venv-gpu
	@.venv-gpu/bin/python -m $(INSTALL) torch hatchling editables
	@.venv-gpu/bin/python -m $(INSTALL) --no-build-isolation --editable '.[dev]'
	@.venv-gpu/bin/python -m pip --disable-pip-version-check install --quiet triton==3.7.1
	@touch $@

gpu-check: .venv-gpu/.installed
	KINFOLK_GPU_CHECK=1 OMP_NUM_THREADS=1 .venv-gpu/bin/python -m pytest \
	  -n 2 --dist loadscope tests/gpu

# Kills, flipped bits, hostile files, full disks, lost ranks: about ten minutes, with a new seed
# each time, which is printed.
faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.campaign $(FAULTS)

# Twenty faults, one at a time, in a copy of the source: do the tests notice each of them?
seeded-faults: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.seeded

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/python docs/generate.py
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The libraries compared with are in .venv-peers; one that cannot be installed is named, and its
# column is left out.
$(PEERS): benchmarks/peers.sh pyproject.toml constraints.txt | $(STAMP)
	@PYTHON=$(BIN)/python sh benchmarks/peers.sh
	@touch $@

bench: $(PEERS)
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done
	@for name in $(SIDE_BY_SIDE); do \
	  echo "== $$name"; .venv-peers/bin/python benchmarks/$$name.py || exit 1; \
	done

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-* $(RUN) $(RUN)-base site build dist lightning_logs
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
