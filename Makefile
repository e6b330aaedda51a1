# Everything on a fresh machine: `make demo` and `make test`. Both make the virtual environment first.
PYTHON  ?= python3
VENV    ?= .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PEERS   := $(VENV)/.peers
AZURITE := $(VENV)/.azurite
# Most tests wait for other processes rather than for a core. A file stays with one worker: its tests share servers.
WORKERS ?= 4
# Where pytest believes to run in CI it shows all of a difference, and looks for that of two large values for minutes.
PYTEST  := env -u CI -u BUILD_NUMBER $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: install demo test test-all check format bench clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,s3,gs,abfs,sftp]"
	touch $(STAMP)

# A server of Azure's API comes from npm only; without npm the tests on abfs:// are skipped, and say so.
$(AZURITE): | $(STAMP)
	! command -v npm >/dev/null || timeout 300 npm install --silent --no-audit --no-fund --prefix $(VENV)/npm azurite@3.37.0 || true
	touch $(AZURITE)

# Libraries that the benchmarks compare with. What cannot be had is named as absent in what they print.
$(PEERS): | $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[bench]" && touch $(PEERS) || echo "peers are missing"

demo: install            ## train on 2 ranks, be killed with SIGKILL inside a save, resume on 1 rank
	$(BIN)/python -m resilio_drills.demo

test: install $(AZURITE)  ## the cut that CI runs
	$(PYTEST) -m "not full"

test-all: install $(AZURITE)  ## the whole matrix
	$(PYTEST)

check: install           ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(PEERS)          ## every figure of the data path next to its peers and limits, as ratios; verify, fingerprints
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.verify --mb 300
	$(BIN)/python -m benchmarks.fingerprints

clean:
	rm -rf $(VENV) .demo dist build .mypy_cache .ruff_cache .pytest_cache
