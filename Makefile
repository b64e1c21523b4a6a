# Every target sets itself up: Python 3.11 and pip are all a machine needs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test coverage lint docs bench setup graphics lock clean

setup: .venv/ready

.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "pistar needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(MAKE) --no-print-directory graphics
	touch $@

# What simulators draw with where there is no screen. Only missing on bare machines; asked for only as root.
graphics:
	@if ! ldconfig -p | grep -q libEGL.so.1 || ! ldconfig -p | grep -q libGL.so.1 || ! ldconfig -p | grep -q libgthread-2.0.so.0; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
				libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libglib2.0-0 libosmesa6 > /dev/null; \
		else \
			echo "note: simulators need libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libglib2.0-0 to draw; ask for them"; \
		fi; \
	fi

demo: setup
	$(BIN)/pistar demo --out demo

# Lint and types, the site built strictly, then the suite.
test: lint docs
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

# Counting lines makes the tests a third longer, so it is asked for.
coverage: setup
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into site/. A warning or a dead link ends it. The variable silences Material's announcement of its successor.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py site

bench: setup
	$(BIN)/python benchmarks/prefix_sharing.py
	$(BIN)/python benchmarks/train_step.py
	$(BIN)/python benchmarks/loader.py
	$(BIN)/python benchmarks/second_start.py
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/online_throughput.py
	$(BIN)/python benchmarks/bandit.py
	$(BIN)/python benchmarks/scaling.py

# The versions everybody tests with. Without index addresses: whose they are is the machine's business.
lock: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.11 --upgrade --quiet \
		--no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file requirements.lock

clean:
	rm -rf .venv .cache site demo quick_demo ript_demo quick_ript_demo
