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
from functools import cache, wraps
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

LOG_FORMAT = "%(name)s|%(levelname)s|%(message)s"


def database(number: int) -> str:
    """The URL of a database of the server."""
    return f"{os.environ[SERVER]}/{number}"


@cache
def client(number: int) -> Any:
    """A client of a database, one per process."""
    return redis.Redis.from_url(database(number), socket_timeout=None)


app = Celery("peers", set_as_current=False)
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_log_format=LOG_FORMAT,
    worker_task_log_format=LOG_FORMAT,
)


def note(word: str, unit: str, **more: Any) -> None:
    """Write something down about a unit of work."""
    line = {"word": word, "at": time.monotonic(), "pid": os.getpid(), **more}
    client(WITNESS_DB).rpush(f"notes:{unit}", json.dumps(line))


def body(task: Any, unit: str, option: int = 0) -> int:
    """Do what the next order of a unit says; without an order, return at once."""
    id_, attempt = task.request.id, task.request.retries
    note("start", unit, id=id_, attempt=attempt)
    order = (client(WITNESS_DB).lpop(f"orders:{unit}") or b"").decode()
    try:
        obey(order, task, unit)
    finally:
        note("end", unit, id=id_, attempt=attempt)
    return option


def obey(order: str, task: Any, unit: str) -> None:
    """Wait at a gate, retry, or end in the way that is ordered."""
    if order == "retry":
        raise task.retry(countdown=0, max_retries=3)
    if order == "ignore":
        raise Ignore
    if order == "reject":
        raise Reject(requeue=False)
    if order == "fail":
        raise RuntimeError(unit)
    if order and client(WITNESS_DB).blpop([f"gate:{unit}:{order}"], timeout=GATE_LIMIT) is None:
        raise TimeoutError(order)


@app.task(name="head")  # type: ignore[untyped-decorator]  # Celery has no types
def head() -> None:
    """The first of a chain."""


@app.task(name="tail")  # type: ignore[untyped-decorator]
def tail(before: object, unit: str) -> None:
    """The last of a chain: writes down what it is given."""
    note("tail", unit, given=before)


@dataclass(frozen=True)
class Peer:
    """A library, or a way to use it.

    Attributes:
        name: as its column is headed.
        package: its name on PyPI; None for a recipe.
        at_enqueue: whether it takes its lock when a task is queued, and not when it runs.
        number: of its database for locks.
        plain: what it makes of a plain function, if anything.
        asynchronous: what it makes of an `async def` function, if anything.
    """

    name: str
    package: str | None
    at_enqueue: bool
    number: int
    plain: Callable[[Callable[[], Any]], Callable[[], Any]] | None
    asynchronous: Callable[[Callable[[], Any]], Callable[[], Any]] | None

    def task(self, settings: str) -> Any:
        """Its task with these settings."""
        return app.tasks[task_name(self.number, settings)]


def task_name(number: int, settings: str) -> str:
    """The name of a library's task."""
    return f"peer-{number}.{settings}"


def make(name: str, run: Callable[..., Any] = body, **options: Any) -> Any:
    """Register a task."""
    return app.task(bind=True, name=name, **options)(run)


# only_one


def ours(settings: str, number: int) -> Callable[[Any], Any]:
    """The decorator with these settings."""
    options = {DEFAULT: {}, RENEWED: {"lease": EXPIRY}, FIXED: {"timeout": EXPIRY}}[settings]
    decorate: Callable[[Any], Any] = only_one(redis=database(number), **options)  # type: ignore[call-overload]
    return decorate


def _above(number: int) -> Callable[[str, str], Any]:
    return lambda name, settings: ours(settings, number)(make(name))


def _below(number: int) -> Callable[[str, str], Any]:
    def decorate(name: str, settings: str) -> Any:
        def run(self: Any, unit: str, option: int = 0) -> int:
            return body(self, unit, option)

        return make(name, ours(settings, number)(run))

    return decorate


def _plain_ours(number: int) -> Callable[[Any], Any]:
    return only_one("plain", redis=database(number))


# The libraries


def _singleton(number: int) -> Callable[[str, str], Any]:
    base = importlib.import_module("celery_singleton").Singleton
    app.conf.singleton_backend_url = database(number)

    def decorate(name: str, settings: str) -> Any:
        options: dict[str, Any] = {} if settings == DEFAULT else {"lock_expiry": EXPIRY}
        return make(name, base=base, **options)

    return decorate


def _once(number: int) -> Callable[[str, str], Any]:
    base = importlib.import_module("celery_once").QueueOnce
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": database(number)}}
    return lambda name, settings: make(name, base=base, once={} if settings == DEFAULT else {"timeout": EXPIRY})


def _heimdall(number: int) -> Callable[[str, str], Any]:
    base: Any = importlib.import_module("celery_heimdall").HeimdallTask

    class Apart(base):  # type: ignore[misc]
        """Its keys are in a database of their own, as it says how in its documentation."""

        abstract = True

        def setup_redis(self) -> Any:
            return client(number)

    def decorate(name: str, settings: str) -> Any:
        options = {} if settings == DEFAULT else {"unique_timeout": EXPIRY}
        return make(name, base=Apart, heimdall={"unique": True, **options})

    return decorate


# Locks around a run


def _recipe(number: int) -> Callable[[str, str], Any]:
    def decorate(name: str, settings: str) -> Any:
        expiry = RECIPE_EXPIRY if settings == DEFAULT else EXPIRY

        def run(self: Any, unit: str, option: int = 0) -> int | None:
            key = f"lock-{unit}"
            if not client(number).set(key, 1, nx=True, ex=expiry):
                return None
            try:
                return body(self, unit, option)
            finally:
                client(number).delete(key)

        return make(name, run)

    return decorate


def _plain_recipe(number: int) -> Callable[[Any], Any]:
    def decorate(function: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(function)
        def run() -> Any:
            if not client(number).set("plain", 1, nx=True, ex=RECIPE_EXPIRY):
                return None
            try:
                return function()
            finally:
                client(number).delete("plain")

        return run

    return decorate


def _redis_lock(number: int) -> Callable[[str, str], Any]:
    lock_of = importlib.import_module("redis_lock").Lock
    options: dict[str, dict[str, Any]] = {
        DEFAULT: {},
        RENEWED: {"expire": EXPIRY, "auto_renewal": True},
        FIXED: {"expire": EXPIRY},
    }

    def decorate(name: str, settings: str) -> Any:
        def run(self: Any, unit: str, option: int = 0) -> int | None:
            lock = lock_of(client(number), unit, **options[settings])
            if not lock.acquire(blocking=False):
                return None
            try:
                return body(self, unit, option)
            finally:
                lock.release()

        return make(name, run)

    return decorate


def _plain_redis_lock(number: int) -> Callable[[Any], Any]:
    lock_of = importlib.import_module("redis_lock").Lock

    def decorate(function: Callable[[], Any]) -> Callable[[], Any]:
        @wraps(function)
        def run() -> Any:
            lock = lock_of(client(number), "plain")
            if not lock.acquire(blocking=False):
                return None
            try:
                return function()
            finally:
                lock.release()

        return run

    return decorate


ABOVE, BELOW, RECIPE = "only_one above `@app.task`", "only_one below `@app.task`", "recipe: `SET NX EX`, then `DEL`"
SINGLETON, ONCE, HEIMDALL, REDIS_LOCK = "celery-singleton", "celery-once", "celery-heimdall", "python-redis-lock"

Make = Callable[[int], Callable[[str, str], Any]]
Wrap = Callable[[int], Callable[[Any], Any]]

MAKERS: list[tuple[str, str | None, bool, Make, Wrap | None, Wrap | None]] = [
    (ABOVE, "only-one", True, _above, _plain_ours, _plain_ours),
    (SINGLETON, SINGLETON, True, _singleton, None, None),
    (ONCE, ONCE, True, _once, None, None),
    (HEIMDALL, HEIMDALL, True, _heimdall, None, None),
    (BELOW, "only-one", False, _below, _plain_ours, _plain_ours),
    (RECIPE, None, False, _recipe, _plain_recipe, None),
    (REDIS_LOCK, REDIS_LOCK, False, _redis_lock, _plain_redis_lock, None),
]

errors: dict[str, str] = {}
"""Why those that cannot be measured cannot."""

peers: list[Peer] = []


def connect(server: str) -> None:
    """Make the tasks of all libraries that are installed, with their locks on a server."""
    os.environ[SERVER] = server
    app.conf.update(broker_url=database(BROKER_DB), result_backend=database(BROKER_DB))
    for number, (name, package, at_enqueue, maker, plain, asynchronous) in enumerate(MAKERS, FIRST_LOCKS_DB):
        try:
            decorate = maker(number)
            for settings in (DEFAULT, RENEWED, FIXED):
                decorate(task_name(number, settings), settings)
        except ImportError as error:
            errors[name] = str(error)
            continue
        wrappers = [wrap(number) if wrap else None for wrap in (plain, asynchronous)]
        peers.append(Peer(name, package, at_enqueue, number, *wrappers))


if SERVER in os.environ:  # in a worker; the program that starts it calls `connect` when it has a server
    connect(os.environ[SERVER])
