"""The tasks of an app, which are found without being imported by anybody."""

from __future__ import annotations

from celery import shared_task

from only_one import only_one
from tests.live.workers import note, wait_at


@only_one("{name}:{order}")
@shared_task  # type: ignore[untyped-decorator]
def ship(order: int, gate: str) -> str:
    """Wait until the test lets it end."""
    note("begun", order)
    wait_at(gate)
    return f"shipped {order}"
