PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# Four files at a time on two cores, those first that take longest.
TOGETHER := --numprocesses 4 --dist loadfile --no-loadscope-reorder
WITH_RABBITMQ := $(patsubst %,tests/live/test_%.py,buffer_one canvas ends put_back queue redelivery rpc tasks)

.PHONY: demo demo-picture newsletter test test-rabbitmq lint types interrupts suite coverage soak mutants matrix benchmark benchmark-throughput benchmark-takeover benchmark-leases benchmark-leftovers benchmark-kills benchmark-queue benchmark-queue-kills benchmark-peers benchmark-newsletter benchmark-interruptions benchmark-async newsletter-kills clean

demo: .venv/demo.stamp
	@$(BIN)/python -m examples.feeds $(ARGS)

# A demo whose timeline becomes the picture of the documentation.
demo-picture: .venv/demo.stamp
	@$(BIN)/python -m examples.feeds --picture docs/timeline.svg $(ARGS)

newsletter: .venv/newsletter.stamp
	@$(BIN)/python -m examples.newsletter $(ARGS)

# Its workers killed at random points, and the newsletter started again each time.
newsletter-kills: .venv/newsletter.stamp
	$(BIN)/python -m benchmarks.newsletter_kills $(ARGS)

# Side by side, as most of the suite's time is spent waiting for workers.
test: .venv/dev.stamp
	@$(MAKE) --no-print-directory -j 4 lint types interrupts suite

# The live tests with another broker, a RabbitMQ of their own, with both of its kinds of queues.
test-rabbitmq: .venv/dev.stamp
	@kinds=$$($(BIN)/python -m tests.rabbitmq) || exit; for kind in $$kinds; do \
		echo "$$kind queues:"; ONLY_ONE_TEST_BROKER=$$kind $(BIN)/python -m pytest \
			--numprocesses 2 --dist loadfile -m "not soak" $(WITH_RABBITMQ) $(ARGS) || exit; \
	done

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/dev.stamp
	$(BIN)/mypy
	$(BIN)/pyright

suite: .venv/dev.stamp
	$(BIN)/python -m pytest $(TOGETHER) -m "not interrupts and not soak" $(ARGS)

# What raises out of nowhere leaves Python's own state behind, so it has a process for itself.
interrupts: .venv/dev.stamp
	$(BIN)/python -m pytest -q -m interrupts

# Which lines and branches the suite runs. It costs half as much time again, so it is not a part of `make test`.
coverage: .venv/dev.stamp
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(TOGETHER) -m "not interrupts and not soak" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The tests that measure times or run long, one at a time; nothing else should run on the machine meanwhile.
soak: .venv/dev.stamp
	$(BIN)/python -m benchmarks.soak $(ARGS)

# Small changes of the product, of which the tests are to notice nine in ten.
mutants: .venv/dev.stamp
	$(BIN)/python -m benchmarks.mutants $(ARGS)

# Every kind of task in every pool under every combination of settings, of which the suite runs a slice.
matrix: .venv/dev.stamp
	POOLS_MATRIX=1 $(BIN)/python -m pytest tests/live/test_pools.py $(ARGS)

benchmark: .venv/dev.stamp
	$(BIN)/python -m benchmarks.round_trips $(ARGS)

benchmark-takeover: .venv/dev.stamp
	$(BIN)/python -m benchmarks.takeover $(ARGS)

benchmark-throughput: .venv/dev.stamp
	$(BIN)/python -m benchmarks.throughput $(ARGS)

benchmark-leases: .venv/dev.stamp
	$(BIN)/pip install --quiet python-redis-lock
	$(BIN)/python -m benchmarks.leases $(ARGS)

# Seconds until the keys of 2,000 cancelled calls are gone on a slow link, which takes some three minutes.
benchmark-leftovers: .venv/dev.stamp
	$(BIN)/python -m benchmarks.leftovers $(ARGS)

# 1,000 async calls at a time through 10 connections, beside bare commands.
benchmark-async: .venv/dev.stamp
	$(BIN)/python -m benchmarks.async_calls $(ARGS)

# What runs beside another holder after 5,000 interruptions of each kind of client.
benchmark-interruptions: .venv/dev.stamp
	$(BIN)/python -m benchmarks.interruptions $(ARGS)

benchmark-kills: .venv/dev.stamp
	$(BIN)/python -m benchmarks.kills $(ARGS)

benchmark-queue: .venv/dev.stamp
	$(BIN)/pip install --quiet celery-singleton==0.3.1 celery-once==3.0.1 celery-heimdall==1.0.1
	$(BIN)/python -m benchmarks.queueing $(ARGS)

benchmark-queue-kills: .venv/dev.stamp
	$(BIN)/python -m benchmarks.queue_kills $(ARGS)

# What becomes of a lock, beside other libraries; ARGS=--write writes docs/comparison.md anew.
benchmark-peers: .venv/dev.stamp
	$(BIN)/pip install --quiet celery-singleton==0.3.1 celery-once==3.0.1 celery-heimdall==1.0.1 python-redis-lock==4.0.1
	$(BIN)/python -m benchmarks.peers $(ARGS)

# Half a million of it, which takes some twenty minutes.
benchmark-newsletter: .venv/newsletter.stamp
	$(BIN)/python -m benchmarks.newsletter $(ARGS)

.venv/%.stamp: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

clean:
	rm -rf .venv .nox build dist *.egg-info
