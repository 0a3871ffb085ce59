"""The work of the jobs: it notes its beginning, each tenth of a second and its end in a file that uses no lock."""

import asyncio
import os
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from only_one import configure

if "TIMEOUT" in os.environ:  # for all jobs that give none themselves
    configure(timeout=float(os.environ["TIMEOUT"]))

WITNESS = Path(os.environ["WITNESS"])
TICKS = 60


def _ticks(day: int) -> Iterator[None]:
    run, is_first = f"{uuid.uuid4().hex} {socket.gethostname()}", not WITNESS.exists()
    dies_at = os.environ.get("DIES_AT")
    for tick in range(TICKS if day else 0):  # for day 0 there is nothing to report
        _note(f"{run} {tick}")
        if is_first and dies_at == str(tick):  # as if it had run out of memory
            os.kill(os.getpid(), signal.SIGKILL)
        yield
    if day:
        _note(f"{run} end")


def _note(line: str) -> None:
    with WITNESS.open("a") as witness:
        witness.write(f"{line}\n")


def make_report(day: int) -> str:
    """Make the report of a day, which takes six seconds."""
    for _ in _ticks(day):
        time.sleep(0.1)
    return "made"


async def make_report_async(day: int) -> str:
    """Make it in an event loop."""
    for _ in _ticks(day):
        await asyncio.sleep(0.1)
    return "made"
