"""A body decorated as a sync function, and as an async one in an event loop of its own: one test speaks for both."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import uuid4

import pytest

from only_one import current_lock, only_one, subscribe
from only_one.events import Event
from only_one.lock.token import TokenFactory
from rigs.waiting import LIMIT

Function = Callable[..., Any]
Decorate = Callable[..., Function]
Busy = Callable[..., AbstractContextManager[object]]


def patient(url: str, seconds: float = LIMIT) -> str:
    """A server whose replies are waited for so long: the product's own client would wait for a second."""
    return f"{url}?socket_timeout={seconds}&socket_connect_timeout={LIMIT}"


CLOSED = "redis://127.0.0.1:1/0"
"""A server that is down."""


def as_async(body: Function) -> Function:
    """An async function with the name, the parameters and the result of a sync one."""

    @functools.wraps(body)
    async def work(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return body(*args, **kwargs)

    return work


def decorated(body: Function, key: Any = "k", **options: Any) -> Function:
    """The body with the decorator above it."""
    decorate: Any = only_one(key=key, **options)
    function: Function = decorate(body)
    return function


def decorated_async(body: Function, key: Any = "k", **options: Any) -> Function:
    """The same as an async function, called in an event loop."""
    function = decorated(as_async(body), key, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return call


def call_both(body: Function = lambda: "ran", key: Any = "k", **options: Any) -> list[Any]:
    """The results of a sync call and of an async one, which comes after it."""
    return [decorate(body, key, **options)() for decorate in (decorated, decorated_async)]


def own_key(*_: object) -> str:
    """A body that gives the key of its run."""
    return str(current_lock().key)


def a_task(app: Any, body: Function = own_key, *, bind: bool = False, **options: Any) -> Any:
    """A task of a Celery app, with the decorator below."""
    body.__name__ = "work"  # Celery compiles a function of that name, which a lambda has not
    return app.task(decorated(body, **options), name=f"task-{uuid4()}", shared=False, bind=bind)


def token_of_the_dead(name: str = "f") -> bytes:
    """The value that a run on this machine has stored whose process there is not."""
    return TokenFactory(name).token(3600).replace(b'"pid":%d,' % os.getpid(), b'"pid":%d,' % 2**30)


both = pytest.mark.parametrize("decorate", [decorated, decorated_async], ids=["sync", "async"])


@contextmanager
def events(*kinds: type[Event]) -> Iterator[list[Any]]:
    """The events of these kinds, or of all, that are emitted until the end of the block."""
    seen: list[Any] = []

    def note(event: Event) -> None:
        if not kinds or isinstance(event, kinds):
            seen.append(event)

    unsubscribe = subscribe(note)
    try:
        yield seen
    finally:
        unsubscribe()
