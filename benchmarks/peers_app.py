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
from functools import cache
from typing import Any, NamedTuple

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


def _above(name: str, number: int, **options: Any) -> None:
    only_one(redis=database(number), **options)(make(name))


def _below(name: str, number: int, **options: Any) -> None:
    make(name, only_one(redis=database(number), **options)(body))


def _singleton(name: str, number: int, **options: Any) -> None:
    app.conf.singleton_backend_url = database(number)
    make(name, base=importlib.import_module("celery_singleton").Singleton, **options)


def _once(name: str, number: int, **options: Any) -> None:
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": database(number)}}
    make(name, base=importlib.import_module("celery_once").QueueOnce, once=options)


def _heimdall(name: str, number: int, **options: Any) -> None:
    base: Any = importlib.import_module("celery_heimdall").HeimdallTask
    # Its keys are in a database of their own, as it says how in its documentation.
    own = type("Apart", (base,), {"abstract": True, "setup_redis": lambda _: client(number)})
    make(name, base=own, heimdall={"unique": True, **options})


def _around(name: str, acquire: Callable[[str], Any], release: Callable[[Any], object]) -> None:
    """A task whose run has a lock around it, which is not waited for."""

    def run(self: Any, unit: str, option: int = 0) -> int | None:
        if not (lock := acquire(unit)):
            return None
        try:
            return body(self, unit, option)
        finally:
            release(lock)

    make(name, run)


def _recipe(name: str, number: int, ex: int = RECIPE_EXPIRY) -> None:
    _around(name, lambda unit: client(number).set(unit, 1, nx=True, ex=ex) and unit, client(number).delete)


def _redis_lock(name: str, number: int, **options: Any) -> None:
    def acquire(unit: str) -> Any:
        lock: Any = importlib.import_module("redis_lock").Lock(client(number), unit, **options)
        return lock if lock.acquire(blocking=False) else None

    _around(name, acquire, lambda lock: lock.release())


class Peer(NamedTuple):
    """A library, or a way to use it.

    Attributes:
        name: as its column is headed.
        package: its name on PyPI; None for a recipe.
        at_enqueue: whether it takes its lock when a task is queued, and not when it runs.
        make: makes a task, by its name, the number of the database for locks, and options.
        expiry: the option for an expiry that is not renewed.
        renewed: the options for one that is renewed, if the library can.
    """

    name: str
    package: str | None
    at_enqueue: bool
    make: Callable[..., None]
    expiry: str
    renewed: dict[str, Any] | None = None

    @property
    def number(self) -> int:
        """Of its database for locks."""
        return FIRST_LOCKS_DB + PEERS.index(self)

    def task(self, settings: str) -> Any:
        """Its task with these settings."""
        return app.tasks[f"peer-{self.number}.{settings}"]

    def make_tasks(self) -> None:
        """Make its tasks with all settings."""
        fixed = {self.expiry: EXPIRY}
        for settings, options in ((DEFAULT, {}), (RENEWED, self.renewed or fixed), (FIXED, fixed)):
            self.make(f"peer-{self.number}.{settings}", self.number, **options)


LEASE, RENEWAL = {"lease": EXPIRY}, {"expire": EXPIRY, "auto_renewal": True}
PEERS = [
    Peer("only_one above `@app.task`", "only-one", True, _above, "timeout", LEASE),
    Peer("celery-singleton", "celery-singleton", True, _singleton, "lock_expiry"),
    Peer("celery-once", "celery-once", True, _once, "timeout"),
    Peer("celery-heimdall", "celery-heimdall", True, _heimdall, "unique_timeout"),
    Peer("only_one below `@app.task`", "only-one", False, _below, "timeout", LEASE),
    Peer("recipe: `SET NX EX`, then `DEL`", None, False, _recipe, "ex"),
    Peer("python-redis-lock", "python-redis-lock", False, _redis_lock, "expire", RENEWAL),
]


def connect(server: str) -> None:
    """Make the tasks of all libraries, with their locks on a server."""
    os.environ[SERVER] = server
    app.conf.update(broker_url=database(BROKER_DB), result_backend=database(BROKER_DB))
    for peer in PEERS:
        peer.make_tasks()


if SERVER in os.environ:  # in a worker; the program that starts it calls `connect` when it has a server
    connect(os.environ[SERVER])
