"""Waiting for a condition, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit: float, problem: str, pause: float = 0.02) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: if it does not come to hold within the limit in seconds.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(pause)
