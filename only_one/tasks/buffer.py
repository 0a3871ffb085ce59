"""The triggers of `buffer_one`: numbered when they first arrive, so that the newest runs and no older one after it."""

from __future__ import annotations

from celery import Celery

from only_one.lock import drive
from only_one.servers import Server

from .broker import remembered_for
from .notes import number_new_trigger, number_trigger


def arrive(server: Server, key: str, app: Celery, task_id: str, trigger: int | None) -> int | None:
    """Number a trigger that has to wait.

    Returns:
        Its number, or None if a newer one waits or has run.
    """
    return drive(server.client, number_trigger(key, "arrive", remembered_for(app), task_id, trigger))


def arrive_anew(server: Server, key: str, app: Celery, task_id: str, digest: str, seconds: float) -> int | str:
    """Number a trigger that is about to be queued.

    Args:
        server: where the key is.
        key: the key as it is in Redis.
        app: the task's app.
        task_id: the trigger's id.
        digest: what tells it from others with this key; empty where that cannot be told.
        seconds: for how long it is waited for, if it waits.

    Returns:
        Its number; or the id of one with the same digest that waits, and is the newest.
    """
    return drive(server.client, number_new_trigger(key, remembered_for(app), task_id, digest, seconds))


def withdraw(server: Server, key: str, app: Celery, trigger: int) -> None:
    """The trigger does not wait any more, and will not run."""
    drive(server.client, number_trigger(key, "withdraw", remembered_for(app), "", trigger))


def published(server: Server, key: str, app: Celery, trigger: int) -> None:
    """The trigger waits in the queue: from now on it is the pending one, unless a newer one is."""
    drive(server.client, number_trigger(key, "pending", remembered_for(app), "", trigger))


def begin(server: Server, key: str, app: Celery, task_id: str, trigger: int | None) -> bool:
    """The trigger has the key: whether it runs, and supersedes every one before it, or is itself superseded."""
    return drive(server.client, number_trigger(key, "begin", remembered_for(app), task_id, trigger)) is not None
