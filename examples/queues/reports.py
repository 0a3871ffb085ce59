"""The work of the jobs: it notes its beginning, each tenth of a second and its end in a file that uses no lock."""

import asyncio
import os
import signal
import socket
import time
import uuid
from pathlib import Path

from only_one import configure

if "TIMEOUT" in os.environ:  # for all jobs that give none themselves
    configure(timeout=float(os.environ["TIMEOUT"]))

WITNESS = Path(os.environ["WITNESS"])
TICKS = 60


def _note(line: str) -> None:
    with WITNESS.open("a") as witness:
        witness.write(f"{line}\n")


def make_report(day: int) -> str:
    """Make the report of a day, which takes six seconds."""
    if not day:  # there is nothing to report
        return "made"
    run, is_first = f"{uuid.uuid4().hex} {socket.gethostname()}", not WITNESS.exists()
    for tick in range(TICKS):
        _note(f"{run} {tick}")
        if is_first and os.environ.get("DIES_AT") == str(tick):  # as if it had run out of memory
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    _note(f"{run} end")
    return "made"


async def make_report_async(day: int) -> str:
    """Make it beside an event loop."""
    return await asyncio.to_thread(make_report, day)
