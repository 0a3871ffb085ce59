"""Runs of ten leases, and those who call for their keys meanwhile: `python -m tests.live.ten_leases_app HOW KEY...`.

A run writes down its start and its end in a file that is opened to append, which is the test's witness: it does not use
the lock.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from celery import Celery

from only_one import configure, current_lock, only_one
from rigs.waiting import LIMIT

LEASE = 1.0
LEASES = 10.0
COPIES = 3
"""Calls with one key in one process, of which one runs."""

app = Celery("ten leases", set_as_current=False)

if "TEN_URL" in os.environ:  # not in the test
    app.conf.broker_url = os.environ["TEN_URL"]
    app.conf.broker_connection_retry_on_startup = True
    configure(redis=os.environ["TEN_URL"])


def note(*words: object) -> None:
    """Append a line to the witness's file, which other processes do, too."""
    line = " ".join(map(str, [*words, os.getpid(), time.monotonic()]))
    with Path(os.environ["TEN_WITNESS"]).open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


def work(key: str) -> None:
    """Compute, or wait, for ten leases; under gevent only the latter lets other greenlets run."""
    until = time.monotonic() + LEASES * LEASE
    while time.monotonic() < until:
        if key.endswith("CPU"):
            sum(number * number for number in range(1000))
        else:
            time.sleep(0.05)


@only_one("{key}", lease=LEASE)
def run(key: str) -> None:
    note("start", key)
    work(key)
    note("end" if current_lock().is_held else "lost", key)


@only_one("{key}", lease=LEASE)
async def run_async(key: str) -> None:
    note("start", key)
    if key.endswith("CPU"):
        work(key)
    else:
        await asyncio.sleep(LEASES * LEASE)
    note("end" if current_lock().is_held else "lost", key)


@app.task(ignore_result=True)  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE)
def task(key: str) -> None:
    note("start", key)
    work(key)
    note("end" if current_lock().is_held else "lost", key)


def in_threads(key: str) -> None:
    with ThreadPoolExecutor(COPIES) as pool:
        list(pool.map(run, [key] * COPIES))


async def in_a_loop(key: str) -> None:
    await asyncio.gather(*[run_async(key) for _ in range(COPIES)])


def contend(key: str) -> int:
    """Call with the key until a call runs; how often none did."""

    @only_one("{key}", lease=LEASE)
    def get(key: str) -> bool:
        note("start", key)
        note("end", key)
        return True

    calls, until = 0, time.monotonic() + LIMIT
    while not get(key) and time.monotonic() < until:
        calls += 1
        time.sleep(0.01)
    return calls


def main(how: str, *keys: str) -> None:
    if how == "threads":
        in_threads(*keys)
    elif how == "asyncio":
        asyncio.run(in_a_loop(*keys))
    else:
        with ThreadPoolExecutor(len(keys)) as pool:
            print(*pool.map(contend, keys), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
