"""The tasks of `benchmarks.queueing`, the processes that call them, and the witness, which does not use any lock.

For each task and argument the witness counts the messages that wait in the queue and the runs that are under way, in a
database of the broker's server. A message waits from just before it is published until its run begins, and the run is
under way until just before it returns: all that is within the time for which the key is to be taken.
If two of one task and argument are ever there at the same time, in the queue or running, that is an overlap.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import redis
from celery import Celery
from celery.signals import before_task_publish

from only_one import only_one

BROKER = "QUEUEING_BROKER"
LOCKS = "QUEUEING_LOCKS"

PREFIX = "queueing:"
OURS = "only_one"
BARE = "no lock"
HEIMDALL = "celery-heimdall"
AT_ONCE = "heimdall, not waiting"
"""celery-heimdall, told not to wait for a second whether a key that is taken becomes free."""

LONGEST_RUN = 0.005

app = Celery("queueing", set_as_current=False)
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)

if BROKER in os.environ:  # not in the program that starts all others
    url = os.environ[LOCKS]
    app.conf.update(
        broker_url=os.environ[BROKER],
        result_backend=os.environ[BROKER],
        only_one_redis=url,
        only_one_prefix=PREFIX,
        singleton_backend_url=url,
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url}},
    )


def beside(broker: str) -> str:
    """The database of the broker's server for all that is not Celery's."""
    return f"{broker.removesuffix('/0')}/1"


@cache
def _witness() -> Any:
    return redis.Redis.from_url(beside(os.environ[BROKER]), socket_timeout=None)


def _count(name: str, argument: int, what: str, **changes: int) -> None:
    """Count something that has happened; all processes do, and each change is seen by one of them as the last."""
    with _witness().pipeline() as pipeline:
        for field in ("queued", "running"):
            pipeline.hincrby(f"{name}:{argument}", field, changes.get(field, 0))
        pipeline.hincrby(what, name, 1)
        queued, running, _ = pipeline.execute()
    if queued + running > 1 and max(changes.values()) > 0:
        _witness().hincrby("overlaps", name, 1)


@before_task_publish.connect  # type: ignore[untyped-decorator]
def _on_publish(sender: str, body: Any, headers: dict[str, Any], **_: Any) -> None:
    _witness().sadd(f"ids:{sender}", headers["id"])
    _count(sender, body[0][0], "published", queued=1)


def _make(name: str, **options: Any) -> Any:
    @app.task(name=name, **options)  # type: ignore[untyped-decorator]  # Celery has no types
    def work(argument: int) -> None:
        """Take a short while."""
        _count(name, argument, "begun", queued=-1, running=1)
        time.sleep(random.uniform(0, LONGEST_RUN))
        _count(name, argument, "ended", running=-1)

    return work


def _singleton() -> None:
    _make("celery-singleton", base=importlib.import_module("celery_singleton").Singleton)


def _once() -> None:
    _make("celery-once", base=importlib.import_module("celery_once").QueueOnce, once={"graceful": True})


def _heimdall_with(name: str, **options: Any) -> None:
    base: Any = importlib.import_module("celery_heimdall").HeimdallTask

    class Apart(base):  # type: ignore[misc]
        """Its keys are on a server of their own, as it says how in its documentation."""

        abstract = True

        def setup_redis(self) -> Any:
            return redis.Redis.from_url(os.environ[LOCKS])

    _make(name, base=Apart, heimdall={"unique": True, **options})


def _heimdall() -> None:
    _heimdall_with(HEIMDALL)


def _heimdall_at_once() -> None:
    _heimdall_with(AT_ONCE, unique_lock_blocking=False)


_PEERS: dict[str, Callable[[], None]] = {
    "celery-singleton": _singleton,
    "celery-once": _once,
    HEIMDALL: _heimdall,
    AT_ONCE: _heimdall_at_once,
}

_make(BARE)
only_one(_make(OURS))

errors: dict[str, str] = {}
"""What is wrong with those that cannot be measured."""

for _name, _make_peer in _PEERS.items():
    try:
        _make_peer()
    except Exception as _error:  # noqa: BLE001 - whatever it is, it is reported
        errors[_name] = f"{type(_error).__name__}: {_error}"

variants = [name for name in (OURS, BARE, *_PEERS) if name not in errors]


def produce(number: int) -> None:
    """Call tasks as ordered, for as long as this process lives."""
    client: Any = redis.Redis.from_url(beside(os.environ[BROKER]), socket_timeout=None)
    client.rpush("ready", number)
    while True:
        order = json.loads(client.blpop([f"orders-{number}"])[1])
        client.rpush("done", json.dumps(_call(order)))


def _call(order: dict[str, Any]) -> dict[str, Any]:
    task, queue, choose = app.tasks[order["name"]], order["queue"], random.Random(order["seed"])
    time.sleep(max(0.0, order["at"] - time.monotonic()))  # all begin at the same time
    ids, raised, began = set(), Counter[str](), time.monotonic()
    calls = 0
    for argument in order["arguments"]:
        try:
            result = task.apply_async((argument,), queue=queue) if queue else task.delay(argument)
            ids.add(result.id)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            raised[f"{type(error).__name__} {error}".strip()] += 1
        calls += 1
        time.sleep(choose.uniform(0, order["pause"]))
        if time.monotonic() > order["until"]:
            break
    return {
        "calls": calls,
        "ids": sorted(filter(None, ids)),
        "raised": raised,
        "began": began,
        "ended": time.monotonic(),
    }
