"""A queue whose messages a test delivers by hand, in this process and in an order that is certain.

What is published stays in the queue until the test delivers it, whatever its countdown says.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.app.trace import build_tracer
from redis import Redis

from only_one import current_lock, only_one
from only_one.call.owed_key import Withdrawal, note_of
from only_one.celery import coalescing
from only_one.clock import now
from only_one.holder import Holder
from only_one.lock.commands import WAITS_NO_MORE
from only_one.lock.token import TokenFactory
from rigs.waiting import eventually

HOUR = 3600
QUEUE_TIMEOUT = HOUR
REMEMBERED = 7200
"""Seconds for which a completion marker is kept, for a broker that delivers again after an hour."""

SLACK = 60
"""Seconds that a test may take between two commands, on a machine that has other things to do too."""

OUTCOMES = {"dropped": (0, 0), "requeued": (0, 1), "run": (1, 0), "run again": (1, 0)}
"""How many runs, and how many messages that wait, are left of a delivery."""

decorated: Any = only_one


class Keys:
    """The values at this test's keys, by their names without its prefix; most tests use the key "k"."""

    def __init__(self, client: Redis, prefix: str) -> None:
        self.redis: Any = client
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return bool(self.redis.exists(f"{self.prefix}{key}"))

    def __getitem__(self, key: str) -> Any:
        return self.redis.get(f"{self.prefix}{key}")

    def __setitem__(self, key: str, value: str | bytes) -> None:
        self.redis.set(f"{self.prefix}{key}", value, ex=600)

    def __delitem__(self, key: str) -> None:
        self.redis.delete(f"{self.prefix}{key}")

    @contextmanager
    def busy(self, value: str | bytes = "somebody else") -> Iterator[None]:
        """A block in which the key "k" is held, and after which it is free."""
        self["k"] = value
        yield
        del self["k"]

    def holder(self, key: str = "k") -> Any:
        return Holder.parse(self[key] or b"")

    def state(self, key: str = "k") -> tuple[str, int | None] | None:
        """The holder's state and attempt."""
        holder = self.holder(key)
        return (holder.state, holder.attempt) if holder else None

    def left(self, key: str = "k") -> float:
        """For how many seconds a key is there: about 0 if it is not, or does not expire."""
        return int(self.redis.pttl(f"{self.prefix}{key}")) / 1000

    def lives_for(self, seconds: float, key: str = "k") -> bool:
        left = self.left(key)
        return max(0, seconds - SLACK) < left <= seconds + 0.5

    def withdraw(self, task_id: str, attempt: int = 0) -> None:
        """Note that a task waits no more."""
        self.redis.set(note_of(f"{self.prefix}k", task_id, 0, attempt), WAITS_NO_MORE)

    def come_to_be_withdrawn(self, task_id: str) -> bool:
        """Whether this is noted of a task, or comes to be."""
        note = note_of(f"{self.prefix}k", task_id, 0, 0)
        return eventually(lambda: self.redis.get(note) == b"%d" % WAITS_NO_MORE)

    def marker(self, task_id: str, key: str = "k") -> str:
        """The name of the completion marker of a task's first attempt."""
        return f"{{{self.prefix}{key}}}:copy:{task_id}:0"

    def marked(self, task_id: str, key: str = "k") -> Any:
        return self.redis.hgetall(self.marker(task_id, key))


class Queue:
    """A queue, and a worker's process that is given what is in it by hand.

    Attributes:
        as_run: gives what Celery runs for a task, if that is not the task.
    """

    def __init__(self, app: Celery, client: Redis) -> None:
        self.app = app
        self.as_run: Any = lambda task: task
        self._client: Any = client
        self._name = app.conf.task_default_queue

    def __len__(self) -> int:
        return int(self._client.llen(self._name))

    def messages(self) -> list[Any]:
        """The messages that wait, the first first."""
        return [json.loads(each) for each in reversed(self._client.lrange(self._name, 0, -1))]

    def take(self) -> Any:
        """The message that was published first."""
        return json.loads(self._client.rpop(self._name))

    def deliver(self, message: Any = None, *, redelivered: bool = False) -> Any:
        """See to a message, or to the first, until its end; returns the result, or the exception that has ended it."""
        message = message or self.take()
        headers = message["headers"]
        args, kwargs, embedded = json.loads(b64decode(message["body"]))
        request = {"delivery_info": {"redelivered": redelivered}, "properties": message["properties"]}
        request |= {"is_eager": False, "args": args, "kwargs": kwargs, "reply_to": message["properties"]["reply_to"]}
        task: Any = self.app.tasks[headers["task"]]
        trace = build_tracer(task.name, self.as_run(task), app=self.app)
        return trace(headers["id"], args, kwargs, {**headers, **embedded, **request})[0]

    def deliver_all(self) -> None:
        """The same with all messages, also with those that are published meanwhile."""
        while self:
            self.deliver()

    def deliver_elsewhere(self, message: Any, *, redelivered: bool = False) -> Any:
        """The same in another thread, where no run is under way."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.deliver, message, redelivered=redelivered).result()


def a_task(app: Celery, function: Any, *, celery: Any = None, **options: Any) -> Any:
    """A task whose function is decorated, and whose message is acknowledged at the end."""
    options = {"key": "k", "timeout": 600, **options}
    settings = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True, **(celery or {})}
    return app.task(decorated(function, **options), **settings)


def above_and_below(app: Celery, function: Any, **options: Any) -> Any:
    """The same with a decorator above it, too, so it is unique from queued to finished."""
    return decorated(a_task(app, function, **options), key="outer", timeout=600)


def work(value: Any = None, more: Any = "more") -> Any:
    """Says which key it has."""
    return value, more, current_lock().key


def unique(app: Celery, *template: Any, function: Any = work, celery: Any = None, **options: Any) -> Any:
    """A task that is unique from queued to finished."""
    task = app.task(function, **{"name": f"task-{uuid4()}", "shared": False, **(celery or {})})
    return decorated(*template, **options)(task)


def done() -> str:
    return "done"


def lambda_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """A function without arguments that Celery takes for a task: one with a name."""

    def function() -> Any:
        return call()

    return function


def token_of(task_id: str | None, *, attempt: int | None = 0, is_dead: bool = False, **fields: Any) -> bytes:
    """The value of a run, of a task or a function: on another machine, or of a process of this one that is gone."""
    value = json.loads(TokenFactory("a task", task_id, attempt, **fields).token(600))
    if is_dead:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        value.update(pid=process.pid)
    else:
        value.update(machine="another")
    return json.dumps(value, separators=(",", ":")).encode()


class Awaits(Task):  # type: ignore[misc]  # Celery has no types
    """Runs what is to be awaited."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.run(*args, **kwargs)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result


class CallsAgain(Task):  # type: ignore[misc]  # Celery has no types
    """Calls its function twice in a delivery.

    Attributes:
        errors: those of the first call after which it does so, too.
        meanwhile: what happens between the two calls.
    """

    abstract = True
    errors: Any = ()
    meanwhile: Any = None

    def __call__(self, *args: Any) -> Any:
        with suppress(*self.errors):
            self.run(*args)
        if self.meanwhile:
            self.meanwhile()
        return self.again(*args)

    def again(self, *args: Any) -> Any:
        return self.run(*args)


def whose() -> Any:
    """Says whose lock it holds."""
    holder = current_lock().holder
    assert holder is not None
    return holder.name, holder.task_id, holder.attempt


class Base(Task):  # type: ignore[misc]  # Celery has no types
    """Says whose lock it holds, as does the other task that it is given."""

    abstract = True

    @decorated("{key}", timeout=HOUR)  # type: ignore[untyped-decorator]
    def run(self, key: str, another: Any = None) -> Any:
        return [whose(), *(another.run(f"{key}-another") if another else ())]


class Calls(Base):
    """Calls the decorated function by ``super()``, with another argument."""

    name = "calls"

    def run(self, key: str) -> Any:
        return super().run(f"{key}-changed", other)


class Other(Base):
    name = "other"


other = Other()


def withdraw(server: Any, key: str, number: int) -> None:
    """Say that the task with this number waits no more, as at the end of a task that has not begun."""
    triggers = coalescing.triggers_of(key)
    names: Any = {"note": f"{{{key}}}:note", "triggers": triggers, "number": number}
    withdrawal = Withdrawal(server, key, b"its words", now() + 60, no_write_in_flight=True, **names)
    server.client.send_raw(withdrawal.command())
