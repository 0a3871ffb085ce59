"""What several rooms' tests of tasks that wait in a queue have in common."""

from __future__ import annotations

from typing import Any

from only_one.call.owed_key import Withdrawal
from only_one.celery import coalescing
from only_one.clock import now


def withdraw(server: Any, key: str, number: int) -> None:
    """Say that the task with this number waits no more, as at the end of a task that has not begun."""
    triggers = coalescing.triggers_of(key)
    names: Any = {"note": f"{{{key}}}:note", "triggers": triggers, "number": number}
    withdrawal = Withdrawal(server, key, b"its words", now() + 60, no_write_in_flight=True, **names)
    server.client.execute_command(*withdrawal.command())
