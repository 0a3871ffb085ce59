"""A queue whose messages a test delivers by hand, in this process and in an order that is certain.

What is published stays in the queue until the test delivers it, whatever its countdown says.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64decode
from typing import Any
from uuid import uuid4

from celery import Celery, Task
from celery.app.trace import build_tracer
from redis import Redis

from only_one import only_one
from only_one.lock.token import TokenFactory

REMEMBERED = 7200
"""Seconds for which word of copies is kept, for a broker that delivers again after an hour."""

CLOSED = "redis://127.0.0.1:1/0"
cover: Any = only_one


class Queue:
    """A queue, and a worker's process that is given what is in it by hand."""

    def __init__(self, app: Celery, client: Redis) -> None:
        self.app = app
        self._client: Any = client
        self._name = app.conf.task_default_queue

    def __len__(self) -> int:
        return int(self._client.llen(self._name))

    def take(self) -> Any:
        """The message that was published first."""
        return json.loads(self._client.rpop(self._name))

    def deliver(self, message: Any, *, redelivered: bool = False) -> Any:
        """See to a message from its begin to its end; returns the result, or the exception that has ended it."""
        headers = message["headers"]
        args, kwargs, embedded = json.loads(b64decode(message["body"]))
        told = {"delivery_info": {"redelivered": redelivered}, "properties": message["properties"]}
        told |= {"is_eager": False, "args": args, "kwargs": kwargs}
        task: Any = self.app.tasks[headers["task"]]
        trace = build_tracer(task.name, task, app=self.app)
        return trace(headers["id"], args, kwargs, {**headers, **embedded, **told})[0]


def a_task(app: Celery, function: Any, *, celery: Any = None, **options: Any) -> Any:
    """A task whose function is covered, and whose message is acknowledged at the end."""
    said = {"name": f"task-{uuid4()}", "shared": False, "acks_late": True, **(celery or {})}
    return app.task(cover(function, key="k", timeout=600, **options), **said)


def done() -> str:
    return "done"


async def done_async() -> str:
    return "done"


def hash_of(redis: Redis, prefix: str, task_id: str, attempt: int = 0) -> Any:
    """What copies of a message have left."""
    return redis.hgetall(f"{{{prefix}k}}:copy:{task_id}:{attempt}")


def token_of(task_id: str, *, state: str = "running", attempt: int | None = 0, is_dead: bool = False) -> bytes:
    """The value of a run of a task: on another machine, or of a process of this one that is gone."""
    found = json.loads(TokenFactory("a task", task_id, attempt, state).token(600))
    if is_dead:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            process.wait()
        found.update(pid=process.pid)
    else:
        found.update(machine="another")
    return json.dumps(found, separators=(",", ":")).encode()


class Awaits(Task):  # type: ignore[misc]  # Celery has no types
    """Runs what is to be awaited."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result
