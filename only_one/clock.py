"""The clock of all deadlines."""

import time
from functools import partial

now = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds by the clock of all deadlines: nobody sets it, and if the system can, it runs on through a suspend."""
