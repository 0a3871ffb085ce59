"""What is done for a task that was covered when it was queued, and has ended without having begun."""

from __future__ import annotations

from typing import Any

from celery import signals

from only_one.events import logger
from only_one.holder import Holder, is_queued
from only_one.lock import RAW, give_back
from only_one.plan import Cover
from only_one.servers import Server

from . import buffer
from .put_back import header_of
from .task_call import call_from_outside
from .wrapping import queue_cover_of


def _on_end(sender: Any, task: Any, **_: Any) -> None:
    """A signal handler, `before_start` or a base class has kept it from running."""
    cover = queue_cover_of(sender)
    if cover is None or getattr(task.request, "only_one_has_begun", False):
        return
    _forget(sender, cover, task.request)


def _on_revoked(sender: Any, request: Any, **_: Any) -> None:
    """It was revoked, or has expired; what happens to the key of a run is seen to elsewhere."""
    cover = queue_cover_of(sender)
    if cover is not None and header_of(request).trigger is not None:
        _forget(sender, cover, request)


def _forget(task: Any, cover: Cover, request: Any) -> None:
    header = header_of(request)
    server = cover.plan_for(call_from_outside(task, cover)).server
    if header.key is None or server is None:
        return
    try:
        value = header.token.encode() if header.token else _queued_value(server, header.key, request)
        if value is not None:
            give_back(server.client, server.dialect, header.key, value)
        if header.trigger is not None:
            buffer.withdraw(server, header.key, task.app, header.trigger)
    except Exception as error:  # noqa: BLE001 - there is nobody to raise it to, and it is forgotten by itself
        logger.debug("the key of %s could not be given back: %s", task.name, error)


def _queued_value(server: Server, key: str, request: Any) -> bytes | None:
    """What stands under the key for a retry, which was put there when its message was published already."""
    value: bytes | None = server.client.execute_command("GET", key, **RAW)
    if value is None or not is_queued(value):
        return None
    holder = Holder.parse(value)
    return value if holder is not None and holder.task_id == request.id else None


signals.task_postrun.connect(_on_end)
signals.task_revoked.connect(_on_revoked)
