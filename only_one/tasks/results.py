"""Results: a task's copies are told that it is stored, and who calls a duplicate that it cannot be had."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from celery import signals
from celery.backends.rpc import RPCBackend

from only_one.events import logger

_warned: WeakSet[Any] = WeakSet()


def _on_end(sender: Any, **_: Any) -> None:
    getattr(sender.request, "only_one_stored", lambda: None)()


def warn_of_rpc(result: Any) -> None:
    """Say, once for each application, that a result can be read once, and only by the process that has queued it."""
    if isinstance(result.backend, RPCBackend) and result.app not in _warned:
        _warned.add(result.app)
        logger.warning(
            "%s was queued already: get() of this duplicate may wait for ever, as rpc:// gives a result only once, and "
            "only to the process that has queued the task; use a result backend that stores results, such as Redis",
            result.id,
        )


signals.task_postrun.connect(_on_end)
