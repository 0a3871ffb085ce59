"""The tasks of `benchmarks.peers`: the same body under the lock of each library, and the witness that it writes to.

The body asks a list in Redis what it has to do, so that two calls with the same arguments can end in different ways.
It writes down when it starts and ends; the witness uses no lock, and a database that no library knows.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Ignore, Reject

from only_one import only_one

SERVER = "PEERS_SERVER"
"""The environment's name for the URL of the server, without a database."""

BROKER_DB, WITNESS_DB, FIRST_LOCKS_DB = 0, 1, 2

EXPIRY = 10
"""Seconds that a lock lives, where an expiry is written at the task."""

RECIPE_EXPIRY = 300
"""Seconds that the recipe writes where no other number is asked for: it has no default."""

GATE_LIMIT = 600
"""Seconds after which a run no longer waits to be let go."""

DEFAULT, RENEWED, FIXED = "default", "renewed", "fixed"
"""Settings of a task: the library's own; an expiry that is renewed if the library can; one that is not renewed."""

app = Celery("peers", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True


def database(number: int) -> str:
    """The URL of a database of the server."""
    return f"{os.environ[SERVER]}/{number}"


@cache
def client(number: int) -> Any:
    """A client of a database, one per process."""
    return redis.Redis.from_url(database(number), socket_timeout=None)


# The body


def note(word: str, unit: str, **more: Any) -> None:
    """Write something down about a unit of work."""
    line = {"word": word, "at": time.monotonic(), "pid": os.getpid(), **more}
    client(WITNESS_DB).rpush(f"notes:{unit}", json.dumps(line))


ERRORS = {"ignore": Ignore(), "reject": Reject(requeue=False), "fail": RuntimeError()}


def body(self: Any, unit: str, option: int = 0) -> int:
    """Do what the next order of a unit says; without an order, return at once."""
    known = {"id": self.request.id, "attempt": self.request.retries}
    note("start", unit, **known)
    order = (client(WITNESS_DB).lpop(f"orders:{unit}") or b"").decode()
    try:
        if order in ERRORS:
            raise ERRORS[order]
        if order == "retry":
            raise self.retry(countdown=0, max_retries=3)
        if order and client(WITNESS_DB).blpop([f"gate:{unit}:{order}"], timeout=GATE_LIMIT) is None:
            raise TimeoutError(order)
    finally:
        note("end", unit, **known)
    return option


@app.task(name="tail")  # type: ignore[untyped-decorator]  # Celery has no types
def tail(before: object, unit: str) -> None:
    """The last of a chain: writes down what it is given."""
    note("tail", unit, given=before)


# The libraries


def make(name: str, run: Callable[..., Any] = body, **options: Any) -> Any:
    """Register a task."""
    return app.task(bind=True, name=name, **options)(run)


def ours(settings: str, number: int) -> Any:
    """The decorator with these settings."""
    options: Any = {DEFAULT: {}, RENEWED: {"lease": EXPIRY}, FIXED: {"timeout": EXPIRY}}[settings]
    return only_one(redis=database(number), **options)


def _above(name: str, settings: str, number: int) -> None:
    ours(settings, number)(make(name))


def _below(name: str, settings: str, number: int) -> None:
    make(name, ours(settings, number)(body))


def _singleton(name: str, settings: str, number: int) -> None:
    app.conf.singleton_backend_url = database(number)
    expiry = None if settings == DEFAULT else EXPIRY
    make(name, base=importlib.import_module("celery_singleton").Singleton, lock_expiry=expiry)


def _once(name: str, settings: str, number: int) -> None:
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": database(number)}}
    options = {} if settings == DEFAULT else {"timeout": EXPIRY}
    make(name, base=importlib.import_module("celery_once").QueueOnce, once=options)


def _heimdall(name: str, settings: str, number: int) -> None:
    base: Any = importlib.import_module("celery_heimdall").HeimdallTask
    # Its keys are in a database of their own, as it says how in its documentation.
    own = type("Apart", (base,), {"abstract": True, "setup_redis": lambda _: client(number)})
    make(name, base=own, heimdall={"unique": True, **({} if settings == DEFAULT else {"unique_timeout": EXPIRY})})


def _recipe(name: str, settings: str, number: int) -> None:
    def run(self: Any, unit: str, option: int = 0) -> int | None:
        if not client(number).set(unit, 1, nx=True, ex=RECIPE_EXPIRY if settings == DEFAULT else EXPIRY):
            return None
        try:
            return body(self, unit, option)
        finally:
            client(number).delete(unit)

    make(name, run)


def _redis_lock(name: str, settings: str, number: int) -> None:
    options = {DEFAULT: {}, RENEWED: {"expire": EXPIRY, "auto_renewal": True}, FIXED: {"expire": EXPIRY}}[settings]

    def run(self: Any, unit: str, option: int = 0) -> int | None:
        lock: Any = importlib.import_module("redis_lock").Lock(client(number), unit, **options)
        if not lock.acquire(blocking=False):
            return None
        try:
            return body(self, unit, option)
        finally:
            lock.release()

    make(name, run)


@dataclass(frozen=True)
class Peer:
    """A library, or a way to use it.

    Attributes:
        name: as its column is headed.
        package: its name on PyPI; None for a recipe.
        at_enqueue: whether it takes its lock when a task is queued, and not when it runs.
        make: makes a task, by its name, its settings and the number of the database for locks.
    """

    name: str
    package: str | None
    at_enqueue: bool
    make: Callable[[str, str, int], Any]

    @property
    def number(self) -> int:
        """Of its database for locks."""
        return FIRST_LOCKS_DB + PEERS.index(self)

    def task(self, settings: str) -> Any:
        """Its task with these settings."""
        return app.tasks[f"peer-{self.number}.{settings}"]


PEERS = [
    Peer("only_one above `@app.task`", "only-one", True, _above),
    Peer("celery-singleton", "celery-singleton", True, _singleton),
    Peer("celery-once", "celery-once", True, _once),
    Peer("celery-heimdall", "celery-heimdall", True, _heimdall),
    Peer("only_one below `@app.task`", "only-one", False, _below),
    Peer("recipe: `SET NX EX`, then `DEL`", None, False, _recipe),
    Peer("python-redis-lock", "python-redis-lock", False, _redis_lock),
]


def connect(server: str) -> None:
    """Make the tasks of all libraries, with their locks on a server."""
    os.environ[SERVER] = server
    app.conf.update(broker_url=database(BROKER_DB), result_backend=database(BROKER_DB))
    for peer in PEERS:
        for settings in (DEFAULT, RENEWED, FIXED):
            peer.make(f"peer-{peer.number}.{settings}", settings, peer.number)


if SERVER in os.environ:  # in a worker; the program that starts it calls `connect` when it has a server
    connect(os.environ[SERVER])
