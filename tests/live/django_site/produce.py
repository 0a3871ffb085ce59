"""A view of the project that queues one order twice; it prints what it got."""

from __future__ import annotations

import sys
from typing import Any

import django

from only_one import AlreadyRunning

django.setup()

from .celery import app  # noqa: E402 - as Django wants it
from .orders import tasks  # noqa: E402

print("configured by importing:", app.configured)
ship: Any = tasks.ship
first = ship.delay(7, sys.argv[1])
try:
    ship.delay(7, sys.argv[1])
except AlreadyRunning as error:
    print("id:", first.id)
    print("of the one that is there:", error.task_id)
