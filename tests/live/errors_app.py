"""Tasks that fail with the errors of only_one; the settings are the app's, in a namespace."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from only_one import carry_on, current_lock, fail, only_one, retry
from rigs.waiting import eventually
from tests.live.workers import note, wait_at
from tests.renewal import renew_now

CLOSED = "redis://127.0.0.1:1/0"
LEASE = 60
"""Seconds: too many to be waited for."""


def is_lost() -> bool:
    """Whether a run has lost its key, which its renewal finds out."""
    lock = current_lock()
    renew_now(lock)
    return not lock.is_held


@only_one("{key}")
def busy(key: str) -> str:
    """Runs until its gate is opened, and another one with that key fails."""
    note("begin", os.getpid())
    wait_at(f"gate-{key}")
    return "done"


@only_one("{key}", when_busy=retry(countdown=0.1, max_retries=2))
def limited(key: str) -> str:
    return key


@only_one("{key}", when_lost=fail)
def lost(key: str) -> str:
    """Runs until it has lost its key, which it then is told."""
    note("begin", os.getpid())
    assert eventually(is_lost), key
    return "done"


@only_one("{key}", when_lost=carry_on)
def ensured(key: str) -> str:
    """The same, but it asks."""
    note("begin", os.getpid())
    assert eventually(is_lost), key
    current_lock().ensure_held()
    return "done"


@only_one("{key}", redis=CLOSED)
def down(key: str) -> str:
    return key


def an_app(serializer: str) -> Celery:
    """An app that speaks to its workers in one way only."""
    settings: dict[str, Any] = {
        "broker_connection_retry_on_startup": True,
        "task_serializer": serializer,
        "result_serializer": serializer,
        "accept_content": [serializer],
        "only_one_prefix": "live:",
        "only_one_when_busy": "only_one.fail",
        "only_one_lease": LEASE,
    }
    if url := os.environ.get("LIVE_URL"):  # in a worker: Celery 5.5 takes these for more than what is set later
        settings |= {"broker_url": url, "result_backend": url}
    app = Celery(f"errors in {serializer}", set_as_current=False)
    app.config_from_object({f"CELERY_{name.upper()}": value for name, value in settings.items()}, namespace="CELERY")
    for task in (busy, limited, lost, ensured, down):
        app.task(task, name=task.__name__, shared=False)
    return app


APPS = {serializer: an_app(serializer) for serializer in ("json", "pickle")}
app = APPS[os.environ.get("LIVE_SERIALIZER", "json")]
