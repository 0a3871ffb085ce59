"""The clock of all deadlines."""

import time
from functools import partial

now = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
"""Seconds by a clock that nobody can set, and that runs on while the machine is suspended, if the system has one."""
