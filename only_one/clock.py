"""The clock of deadlines: it is the holder's own, and no wall clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

now: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)
"""Seconds by a clock that nobody sets, and that where it can runs on while the machine is suspended."""
