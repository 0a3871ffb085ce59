"""Runs the code blocks of README.md and of each page in docs, on a server of their own."""

from __future__ import annotations

from itertools import count
from typing import Any

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from only_one import configure, events
from only_one.testing import redis_server
from rigs.shared_tasks import forget_shared_tasks

_OPEN: list[Any] = []
_NUMBERS = count()


def _begin(namespace: dict[str, Any]) -> None:
    forget_shared_tasks()
    server = redis_server()
    configured = configure(redis=server.__enter__().url)
    # A module of its own for each page, as Celery names tasks by it, and copies them from app to app.
    namespace["__name__"] = f"page_{next(_NUMBERS)}"
    _OPEN.extend((configured, server))


def _end(_namespace: dict[str, Any]) -> None:
    for each in _OPEN:
        each.__exit__(None, None, None)
    _OPEN.clear()
    events._hooks.clear()  # noqa: SLF001 - a page shows how to subscribe, and need not show how to end it


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],  # a `*` does not match a slash
    setup=_begin,
    teardown=_end,
).pytest()
