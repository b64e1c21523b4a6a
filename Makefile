# Every target sets itself up: Python 3.11 and pip are all a machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench setup lock clean

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "pistar needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

demo: setup
	rm -rf demo/checkpoint
	$(BIN)/pistar demo tests/fixtures/openpi/openpi_ckpt_pi0_tiny.tar.gz --robot aloha --action-horizon 10 --tokenizer tiny --out demo

test: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup --cov --cov-report=term

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/prefix_sharing.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/second_start.py
	$(BIN)/python benchmarks/scaling.py

# The versions everybody tests with. Without index addresses: whose they are is the machine's business.
lock: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.11 --upgrade --quiet \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file requirements.lock

clean:
	rm -rf .venv .cache demo
