"""The tasks of the live tests: a run does what it is ordered to, one order after the other.

A run writes down its begin and its end in a file that is opened to append, which is the tests' witness: it does not use
the lock. No key expires within a test, unless the test says so.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.signals import task_postrun, task_received
from kombu.common import Broadcast

from only_one import AlreadyRunning, buffer_one, configure, current_lock, fail, only_one, retry, skip
from only_one.clock import now
from only_one.connections.server import find_server
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import release_later
from rigs.waiting import LIMIT
from tests.interruptions import raises
from tests.live.brokers import KIND, consumed, settings_of
from tests.live.workers import BROKER, PREFIX, SETTINGS, URL, note, wait_at
from tests.renewal import is_renewed

TIMEOUT = 10 * LIMIT
AT_LEAST = TIMEOUT / 2
LEASE = 60.0
SHORT_LEASE = 3.0

PAUSE = 0.55
"""Seconds for which a run lasts that is longer than half of the visibility timeout of `test_redelivery`."""

EXCHANGES = {"direct": "direct", "topic": "topic.#"}
"""Queues of an exchange of this type of their own, with their routing keys."""


app: Any = Celery("live", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 4
app.conf.accept_content = ["json", "pickle"]


def next_number(what: str) -> int:
    """Count up, for all processes."""
    with redis.Redis.from_url(os.environ[URL]) as client:
        return int(client.incr(f"number:{what}"))


if URL in os.environ:  # in a worker
    app.conf.update({"result_backend": os.environ[URL], **json.loads(os.environ[SETTINGS])})
    app.conf.update({"broker_url": os.environ[BROKER], **settings_of(KIND)})
    configure(redis=os.environ[URL], prefix=PREFIX)
    for kind, key in EXCHANGES.items():
        options = consumed().get("options", {})
        app.amqp.queues.add(kind, exchange=f"{kind}s", exchange_type=kind, routing_key=key, **options)
    if "BROADCAST" in os.environ:
        app.amqp.queues.add(Broadcast(os.environ["BROADCAST"]))  # type: ignore[no-untyped-call]

    @task_received.connect(weak=False)  # type: ignore[untyped-decorator]
    def received(request: Any, **_: Any) -> None:
        """Write down what a worker is given."""
        note("received", *request.args[:1])

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def seen(args: list[Any], **_: Any) -> None:
        """Write down that a delivery has been seen to, whether it ran or not."""
        note("seen", *args[:2])


class Trouble(Exception):
    """Raised by a run."""


def end_the_process(key: str, end: Callable[[], None]) -> None:
    note("end", key)
    end()


def stay_in_c(*_: Any) -> None:
    """Stay in one C call, with Python's lock: no other thread gets a turn, and no signal is heeded."""
    system, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(256)
    system.pthread_mutex_init(mutex, None)
    system.pthread_mutex_lock(mutex)
    system.pthread_mutex_lock(mutex)


def note_the_request(task: Any, key: str) -> None:
    """Write down all that a run is told of its message, as far as JSON can say it."""
    note("request", key, json.dumps({**vars(task.request), "repr": repr(task.request.args)}, default=str))


def see_it_renewed(_: Any, key: str) -> None:
    note("renewed", key, is_renewed(current_lock()))


ORDERS: dict[str, Callable[[Any, str], Any]] = {
    "gate": lambda _, key: wait_at(f"gate:{key}"),
    "pause": lambda *_: time.sleep(PAUSE),
    "sleep": lambda *_: time.sleep(TIMEOUT),
    "C call": stay_in_c,
    "note the request": note_the_request,
    "see it renewed": see_it_renewed,
    "exception": raises(Trouble()),
    "ignore": raises(Ignore()),
    "exit": lambda _, key: end_the_process(key, lambda: sys.exit("exit")),
    "kill": lambda _, key: end_the_process(key, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "reject": raises(Reject()),
    "reject and requeue": raises(Reject(requeue=True)),
    "retry": lambda task, _: task.retry(countdown=0),
    "replace": lambda task, key: task.replace(task.si(key)),
}


def whose() -> dict[str, Any]:
    """What others see of the run that calls this."""
    holder = current_lock().holder
    assert holder is not None
    return {"name": holder.name, "id": holder.task_id, "attempt": holder.attempt, "held": current_lock().is_held}


def work(task: Any, key: str, *orders: Any) -> Any:
    """Do what is ordered; what comes after "once" is for the first run of a key only.

    Returns:
        The last order that is none, or what others see of this run.
    """
    is_first = "once" not in orders or next_number(key) == 1  # counted before a test is told, and may kill the run
    note("begin", key, task.request.retries)
    result = None
    try:
        for order in orders:
            if order == "once":
                if not is_first:
                    break
            elif isinstance(order, str) and order in ORDERS:
                ORDERS[order](task, key)
            else:
                result = order
    except Exception:
        note("end", key)
        raise
    result = whose() if result is None else result
    note("end", key, result if isinstance(result, int) else "")
    return result


def below(name: str, celery: Any = None, *, first: Sequence[str] = (), **options: Any) -> Any:
    """A task whose run is decorated; it obeys these orders first."""

    @only_one("{key}", **{"timeout": TIMEOUT, **options})
    def run(self: Any, key: str, *orders: Any) -> Any:
        return work(self, key, *first, *orders)

    return app.task(**{"name": name, "bind": True, "shared": False, **(celery or {})})(run)


def above(name: str, celery: Any = None, *, key: Any = "{key}", **options: Any) -> Any:
    """A task that is unique from queued to finished."""

    def run(self: Any, key: str, *orders: Any) -> Any:
        return work(self, key, *orders)

    task = app.task(**{"name": f"unique {name}", "bind": True, "shared": False, **(celery or {})})(run)
    decorated: Any = only_one(key, **{"timeout": TIMEOUT, **options})(task)
    return decorated


REDELIVERED = ("once", "pause", "gate")
LATE = {"acks_late": True, "reject_on_worker_lost": True}
AGAIN = {"autoretry_for": (Trouble,), "default_retry_delay": 0, "max_retries": 2}
VARIANTS: dict[str, Any] = {
    "plain": {},
    "late": {"celery": LATE},
    "cooling": {"at_least": AT_LEAST},
    "again": {"celery": AGAIN},
    "leased": {"timeout": None, "lease": LEASE},
    "leased late": {"celery": LATE, "timeout": None, "lease": LEASE},
    "elsewhere": {"celery": LATE, "timeout": None, "lease": SHORT_LEASE, "takeover": False},
}
BELOW = {name: below(name, **options) for name, options in VARIANTS.items()}
ABOVE = {name: above(name, **options) for name, options in VARIANTS.items()}

plain = BELOW["plain"]
unique = ABOVE["plain"]

# Below @app.task

# In workers of the first version it does the same, under this name.
redelivered = below("tests.live.redelivery_app.late", {"acks_late": True}, first=REDELIVERED)
requeued = below("requeued", LATE, when_busy=retry())


PAUSE_OF_CANVAS = 2
"""Seconds between two deliveries of what waits, of which there are dozens, and the worker has others to see to."""


def instead(error: AlreadyRunning) -> str:
    """A policy of the user's own."""
    return f"instead of {error.key.removeprefix(PREFIX)}"


OF_POLICY = {
    "not given": plain,
    "skip": below("skip", when_busy=skip),
    "fail": below("fail", when_busy=fail),
    "retry()": below("retry()", when_busy=retry(countdown=PAUSE_OF_CANVAS)),
    "buffer_one()": below("buffer_one()", when_busy=buffer_one(countdown=PAUSE_OF_CANVAS)),
    "a callable": below("a callable", when_busy=instead),
    "unique": unique,
}
"""Also of a task that is unique from queued to finished: no policy is given to it."""

# Others


@app.task(shared=False)  # type: ignore[untyped-decorator]
def other(*_: Any) -> str:
    """Stands beside or before a decorated task."""
    return "other"


@app.task(shared=False)  # type: ignore[untyped-decorator]
def after(value: Any) -> Any:
    """What comes next, and gives what it was given."""
    return value


@app.task(shared=False)  # type: ignore[untyped-decorator]
def hear_of_trouble(_request: Any, error: Any, _traceback: Any, key: str) -> None:
    """A link for errors."""
    note("trouble", key, type(error).__name__)


@app.task(shared=False)  # type: ignore[untyped-decorator]
def leave_a_release(key: str) -> None:
    """Its process has a release to repeat, and takes the server for down."""
    server = find_server(os.environ[URL])
    server.node_of(key).fail(TIMEOUT)
    server.client.send_raw(("SET", key, key))
    release_later(PendingRelease(server, key, key.encode(), now() + TIMEOUT, no_write_in_flight=True))
