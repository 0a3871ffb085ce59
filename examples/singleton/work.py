"""What takes its time in the examples."""

from __future__ import annotations

import time


def take(seconds: float) -> None:
    """Take as long as real work would.

    Args:
        seconds: how long that is.
    """
    time.sleep(seconds)
