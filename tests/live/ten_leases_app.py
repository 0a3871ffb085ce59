"""Runs of ten leases, and those who call for their keys meanwhile: `python -m tests.live.ten_leases_app HOW KEY...`.

A run writes down its start and its end with the test's witness, which does not use the lock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from only_one import current_lock, only_one
from rigs.waiting import LIMIT
from tests.live.app import app
from tests.live.workers import note

LEASE = 1.0
LEASES = 10.0
CALLS = 3
"""Calls with one key in one process, of which one runs."""


@contextmanager
def noted(key: str) -> Iterator[None]:
    """Write down the start of a run, and its end, or that it has lost its key."""
    note(key, "start")
    yield
    note(key, "end" if current_lock().is_held else "lost")


def work(key: str) -> None:
    """Compute, or wait, for ten leases; under gevent only the latter lets other greenlets run."""
    with noted(key):
        until = time.monotonic() + LEASES * LEASE
        while time.monotonic() < until:
            if key.endswith("CPU"):
                sum(number * number for number in range(1000))
            else:
                time.sleep(0.05)


run = only_one(work, key="{key}", lease=LEASE)
task = app.task(name="ten leases", shared=False, ignore_result=True)(run)


@only_one("{key}", lease=LEASE)
async def run_async(key: str) -> None:
    if key.endswith("CPU"):
        work(key)
    else:
        with noted(key):
            await asyncio.sleep(LEASES * LEASE)


async def in_a_loop(key: str) -> None:
    await asyncio.gather(*[run_async(key) for _ in range(CALLS)])


def contend(key: str) -> int:
    """Call with the key until a call runs; how often none did."""

    @only_one("{key}", lease=LEASE)
    def get(key: str) -> bool:
        with noted(key):
            return True

    calls, until = 0, time.monotonic() + LIMIT
    while not get(key) and time.monotonic() < until:
        calls += 1
        time.sleep(0.01)
    return calls


def main(how: str, *keys: str) -> None:
    if how == "threads":
        with ThreadPoolExecutor(CALLS) as pool:
            list(pool.map(run, keys * CALLS))
    elif how == "asyncio":
        asyncio.run(in_a_loop(*keys))
    else:
        with ThreadPoolExecutor(len(keys)) as pool:
            print(*pool.map(contend, keys), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
