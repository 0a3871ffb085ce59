"""A command of the project that calls functions, and queues one order twice; it prints what it got."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django

from only_one import AlreadyRunning, only_one
from only_one.inspection import held

django.setup()

from .celery import app  # noqa: E402 - as Django wants it
from .orders import tasks  # noqa: E402


@only_one("reindex")
def reindex() -> list[str]:
    """Which keys are held."""
    return [each.key for each in held()]


@only_one("reindex")
def reindex_in_thread() -> list[str]:
    """The same, where Celery's current app is another."""
    return [each.key for each in held()]


with ThreadPoolExecutor(1) as pool:
    print("keys of functions:", reindex(), pool.submit(reindex_in_thread).result())
print("configured by importing and by functions:", app.configured)
ship: Any = tasks.ship
first = ship.delay(7, sys.argv[1])
try:
    print("has started:", not first.is_duplicate)
    ship.delay(7, sys.argv[1])
except AlreadyRunning as error:
    print("id:", first.id)
    print("of the one that is there:", error.task_id)
