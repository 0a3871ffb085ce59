PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
INTERRUPTS := tests/test_interrupts.py

.PHONY: demo test lint types suite benchmark benchmark-takeover benchmark-leases clean

demo: .venv/demo.stamp
	@$(BIN)/python -m examples.feeds $(ARGS)

test: lint types suite

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy
	$(BIN)/pyright

suite: .venv/dev.stamp
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses 2 --dist loadfile --ignore $(INTERRUPTS) $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
# What interrupts at every line interrupts coverage in its locks, too, so these run without it.
	$(BIN)/python -m pytest $(INTERRUPTS)

benchmark: .venv/dev.stamp
	$(BIN)/python -m benchmarks.round_trips $(ARGS)

benchmark-takeover: .venv/dev.stamp
	$(BIN)/python -m benchmarks.takeover $(ARGS)

benchmark-leases: .venv/dev.stamp
	$(BIN)/pip install --quiet python-redis-lock
	$(BIN)/python -m benchmarks.leases $(ARGS)

.venv/%.stamp: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv .nox build dist *.egg-info
