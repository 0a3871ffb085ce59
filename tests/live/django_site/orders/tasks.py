"""The tasks of an app, which are found without being imported by anybody."""

from __future__ import annotations

from typing import Any

import celery

from only_one import only_one
from tests.live.crew import note, wait_at

shared_task: Any = celery.shared_task  # which has no types


@only_one("{name}:{order}")
@shared_task
def ship(order: int, gate: str) -> str:
    """Wait until the test lets it end."""
    note("begun", order)
    wait_at(gate)
    return f"shipped {order}"
