"""Waiting for what others do: other threads, processes and servers, on a machine that has other things to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

LIMIT = float(os.environ.get("ONLY_ONE_TEST_LIMIT", "120"))
"""Seconds after which what a test waits for will not come any more: a machine of a tenth of the speed keeps them."""


def eventually(condition: Callable[[], object], limit: float = LIMIT, pause: float = 0.01) -> bool:
    """Whether a condition comes to hold within a limit in seconds; `pause` is longer where it costs much to look."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def is_gone(pid: int) -> bool:
    """Whether a process has ended and was waited for: a zombie is not gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def wait_until(condition: Callable[[], object], limit: float, problem: str, pause: float = 0.02) -> None:
    """Wait for a condition.

    Raises:
        TimeoutError: if it does not come to hold within the limit in seconds.
    """
    if not eventually(condition, limit, pause):
        raise TimeoutError(problem)
