"""What the tests of tasks that are unique from queued to finished have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import uuid4

from celery import Celery, _state
from redis import Redis

from only_one import current_lock, only_one
from only_one.call.owed_key import Withdrawal
from only_one.celery import coalescing
from only_one.clock import now

CLOSED = "redis://127.0.0.1:1/0"
QUEUE_TIMEOUT = 3600
SLACK = 60
"""Seconds that a test may take between two commands, on a machine that has other things to do too."""

KeyIsBusy = Callable[..., AbstractContextManager[None]]
cover: Any = only_one


@contextmanager
def is_current(app: Celery) -> Iterator[None]:
    before = _state._tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _state._set_current_app(before)


def work(value: Any = None, more: Any = "more") -> Any:
    """Says which key it has."""
    return value, more, current_lock().key


def a_task(app: Celery, *template: Any, function: Any = work, celery: Any = None, **options: Any) -> Any:
    """A covered task of the app."""
    made = app.task(function, **{"name": f"task-{uuid4()}", "shared": False, **(celery or {})})
    return cover(*template, **options)(made)


def lives_for(seconds: float, left: float) -> bool:
    return seconds - SLACK < left <= seconds + 1


def other(*_: Any) -> str:
    return "other"


def messages(redis: Redis, prefix: str) -> list[dict[str, Any]]:
    """The headers of the messages that wait, the first first."""
    found: Any = redis.lrange(f"{prefix}queue", 0, -1)
    return [json.loads(each)["headers"] for each in reversed(found)]


def withdraw(server: Any, key: str, number: int) -> None:
    """Say that the task with this number waits no more, as at the end of a task that has not begun."""
    triggers = coalescing.triggers_of(key)
    names: Any = {"note": f"{{{key}}}:note", "triggers": triggers, "number": number}
    withdrawal = Withdrawal(server, key, b"its words", now() + 60, no_write_in_flight=True, **names)
    server.client.execute_command(*withdrawal.command())
