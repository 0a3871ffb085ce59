PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
PORT ?= 8000
SITE := .venv/site
# Five files at a time on two cores, because most tests wait; those first that take longest.
TOGETHER := --numprocesses 5 --dist loadfile --no-loadscope-reorder
# Each process would compile the package and its tests anew, and there are hundreds.
unexport PYTHONDONTWRITEBYTECODE
PEERS := celery-singleton==0.3.1 celery-once==3.0.1 celery-heimdall==1.0.1 python-redis-lock==4.0.1 sherlock==0.4.1 filelock \
	huey==3.5.4 hiredis
BESIDE_PEERS := PYTHONPATH=$(CURDIR)/.venv/peers $(BIN)/python
WITH_RABBITMQ := $(patsubst %,tests/live/test_%.py,canvas ends redelivery requeued)

.DEFAULT_GOAL := help
.PHONY: help demo demo-picture newsletter docs dev test test-rabbitmq lint types interrupts suite site browser-check words \
	release-check queues coverage soak soak-hour mutants simulate simulate-mutants benchmark benchmark-peers clean

help: ## list these commands
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-24s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ For users of a clone

demo: .venv/demo.stamp ## a feed importer at work, with a worker that is killed
	@$(BIN)/python -m examples.feeds $(ARGS)

demo-picture: .venv/demo.stamp ## the same, whose timeline becomes the picture of the documentation
	@$(BIN)/python -m examples.feeds --picture docs/timeline.svg $(ARGS)

newsletter: .venv/newsletter.stamp ## a newsletter that is made in parallel, and sent once when all of it is made
	@$(BIN)/python -m examples.newsletter $(ARGS)

docs: site ## build the documentation and serve it on port 8000, or PORT=...
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) $(PORT)

clean: ## remove .venv and everything that was built
	rm -rf .venv .nox build dist mutants *.egg-info

##@ For changes (pytest's arguments in ARGS="...")

dev: .venv/dev.stamp ## make .venv, with all that the commands below need

# Side by side, because most of the suite's time is spent waiting for workers.
test: .venv/dev.stamp ## all that must pass before a commit: lint, types, interrupts, suite and site
	@$(MAKE) --no-print-directory -j 5 lint types interrupts suite site

lint: .venv/dev.stamp ## ruff: rules and format; import-linter: which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: .venv/dev.stamp ## mypy and pyright
	$(BIN)/mypy
	$(BIN)/pyright

suite: .venv/dev.stamp ## the tests, with those of the code in README.md and docs
	$(BIN)/python -m pytest $(TOGETHER) -m "not interrupts and not soak" $(ARGS)

# Exceptions at random points leave Python's own state behind, so these tests have a process of their own.
interrupts: .venv/dev.stamp ## the tests that interrupt calls at random points, or fork
	$(BIN)/python -m pytest -q -m interrupts $$(grep -rl --include="*.py" "mark\.interrupts" tests)

# A page that was built is not read again and does not warn again, so a failed build is removed.
site: .venv/dev.stamp ## build the documentation in .venv/site; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q -b html docs $(SITE) || { rm -rf $(SITE); exit 1; }

browser-check: site ## each page on a phone and a desk, light and dark: what is cut off or unreadable; pictures in .venv
	@$(BIN)/python -m rigs.browser $(SITE)

words: ## words of each page; the suite sees sentences that are too long
	@wc -w README.md CONTRIBUTING.md $$(find docs -name "*.md" | sort)

# It uploads nothing: CONTRIBUTING.md says what comes next.
release-check: .venv/dev.stamp ## sdist and wheel in dist/, as they would be released: built twice, compared, checked and tried
	@git diff --quiet HEAD || { echo "commit first: what is built is what is committed"; exit 1; }
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) ONLY_ONE_RELEASE=dist $(BIN)/python -m pytest -v tests/test_wheel.py $(ARGS)
	$(BIN)/pip install --quiet --disable-pip-version-check twine
	$(BIN)/twine check --strict dist/*

# With both kinds of RabbitMQ's queues; the tests start a RabbitMQ of their own.
test-rabbitmq: .venv/dev.stamp ## the live tests again, with RabbitMQ as broker
	@kinds=$$($(BIN)/python -m rigs.rabbitmq) || exit; for kind in $$kinds; do \
		echo "$$kind queues:"; ONLY_ONE_TEST_BROKER=$$kind $(BIN)/python -m pytest \
			--numprocesses 2 --dist loadfile -m "not soak" $(WITH_RABBITMQ) $(ARGS) || exit; \
	done

# It costs half as much time again, so it is not a part of `make test`.
coverage: .venv/dev.stamp ## the suite, and the lines and branches that it does not run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(TOGETHER) -m "not interrupts and not soak" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

simulate: .venv/dev.stamp ## search interleavings: 10,000 fresh histories of both worlds; --messages for Celery's, --seed N for one again
	$(BIN)/python -m tests.simulation --both $(ARGS)

simulate-mutants: .venv/dev.stamp ## after how many histories each of 40 small changes of the code is seen; hours
	$(BIN)/python -m benchmarks.simulated_mutants $(ARGS)

##@ Measurements (with nothing else running; options in ARGS="...", such as ARGS=--help)

# One at a time. The output of those that pass is their figures; ONLY_ONE_SOAK_SEED=N repeats a random one.
soak: .venv/dev.stamp ## the tests that measure times or run long, and what they have measured
	$(BIN)/python -m pytest -v -m soak -rfEP --durations=0 $(ARGS)

# It uses half a core, so other things may run beside it.
soak-hour: .venv/dev.stamp ## an hour of kills, pauses, cuts and restarts with real workers; --broker classic for RabbitMQ
	$(BIN)/python -m benchmarks.soak_hour $(ARGS)

# The rounds of all queues, ten at a time, take an hour; each environment is installed once.
queues: .venv/dev.stamp ## real workers of RQ, Dramatiq, arq, ... on two machines, one of which is killed; ARGS="--rounds 1 arq"
	$(BIN)/python -m benchmarks.queues $(ARGS)

# A quarter of an hour for a module whose tests start servers. It uses all cores, unless ARGS has --jobs N.
mutants: .venv/dev.stamp ## small changes of one module that none of its tests notices: ARGS="only_one/lock/commands.py"
	$(BIN)/python -m benchmarks.mutants $(ARGS)

.venv/peers: Makefile | .venv/dev.stamp
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@ $(PEERS)
	touch $@

benchmark: .venv/peers ## a decorated call beside bare commands and the peers, with and without hiredis
	$(BESIDE_PEERS) -m benchmarks.costs $(ARGS)

# Some six minutes; ARGS=--write replaces the tables in docs/comparison.md.
benchmark-peers: .venv/peers ## what becomes of a lock, beside other libraries
	$(BESIDE_PEERS) -m benchmarks.peers $(ARGS)

.venv/%.stamp: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@
