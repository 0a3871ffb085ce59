"""Workers of several kinds for the live tests, and what their runs have written down."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import redis
from celery._state import get_current_app

from only_one.testing import Guarded, guarded
from tests.waiting import LIMIT, eventually

P = ParamSpec("P")
T = TypeVar("T")

ROOT = Path(__file__).parents[2]

# Results and messages that are sent when the server is gone would try for 20 s each to say so.
BRIEF = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}}


def note(*words: object) -> None:
    """Append a line to the witness's file, which other processes do, too."""
    with Path(os.environ["LIVE_WITNESS"]).open("ab", buffering=0) as file:
        file.write(" ".join(map(str, words)).encode() + b"\n")


def wait_at(gate: str) -> None:
    """Wait until somebody lets one run pass this gate: for longer than any test waits for anything.

    Raises:
        TimeoutError: if nobody does.
    """
    with redis.Redis.from_url(os.environ["LIVE_URL"], socket_timeout=None) as client:
        if client.blpop([gate], timeout=10 * LIMIT) is None:
            raise TimeoutError(gate)


class Witness:
    """The file in which runs write down what they do, in the order in which they do it; it does not use the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, *head: str) -> list[list[str]]:
        """The lines that begin with these words, without them."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = [line.split() for line in text.splitlines()]
        return [line[len(head) :] for line in lines if line[: len(head)] == list(head)]


def environment(url: str, witness: Path, **more: str) -> dict[str, str]:
    """What a worker's process is told."""
    return {**os.environ, "LIVE_URL": url, "LIVE_PREFIX": "live:", "LIVE_WITNESS": str(witness), **more}


@contextmanager
def celery_worker(
    application: str, log: Path, env: dict[str, str], *options: str, pool: str = "prefork", size: int = 3
) -> Iterator[Guarded]:
    """Run a worker for the length of a `with` block; its log is printed at the end."""
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command = [sys.executable, "-m", "celery", "-A", application, "worker", "-l", "INFO", *quiet]
    command += ["-P", pool, "-c", str(size), *options]
    try:
        with log.open("wb") as output, guarded(command, cwd=ROOT, env=env, stdout=output, stderr=output) as process:
            assert eventually(lambda: b" ready." in log.read_bytes() or process.poll() is not None, LIMIT)
            assert process.poll() is None, log.read_text()[-2000:]
            yield process
    finally:
        print(log.read_text()[-20_000:])


def leave(app: Any) -> None:
    """Let go of an application's server; results that are collected later are not to look for it, to say so."""
    app.backend.result_consumer.stop()
    app.backend.result_consumer._pubsub = None
    app.close()


def evaluated(function: Callable[P, T]) -> Callable[P, T]:
    """With annotations that are no strings, which Celery 5.5 does not read."""
    function.__annotations__ = get_type_hints(function)
    return function


@contextmanager
def sender(app: Any, url: str, **settings: Any) -> Iterator[None]:
    """Let this process send an application's tasks for the length of a `with` block."""
    app.conf.update(broker_url=url, result_backend=url, result_backend_transport_options=BRIEF, **settings)
    before = get_current_app()
    app.set_current()
    try:
        yield
    finally:
        before.set_current()
        leave(app)
