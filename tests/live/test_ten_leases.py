"""Runs that are ten leases long, whatever they do, while others call for their keys all the time.

`python -m tests.live.test_ten_leases KEY` is such a run. That those in Celery's pools are renewed is in `test_pools`,
and greenlets that compute are in `tests/test_gevent.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from only_one import configure, current_lock, only_one
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually
from tests.live.workers import PREFIX, ROOT, URL, Scene, note

LEASE, LEASES = 1.0, 10
KEYS = ["sync-IO", "asyncio-IO", "sync-CPU", "asyncio-CPU"]


def work(key: str) -> None:
    """Compute, or wait, for ten leases; and write down whether the key was kept."""
    note(key, "start")
    until = time.monotonic() + LEASES * LEASE
    while time.monotonic() < until:
        if key.endswith("CPU"):
            sum(number * number for number in range(1000))
        else:
            time.sleep(0.05)
    note(key, "end" if current_lock().is_held else "lost")


run = only_one(work, key="{key}", lease=LEASE)


@only_one("{key}", lease=LEASE)
async def run_async(key: str) -> None:
    """Wait in an event loop, or keep that from doing anything else."""
    if key.endswith("CPU"):
        work(key)
    else:
        await asyncio.to_thread(work, key)


@pytest.mark.soak
def test_nothing_overlaps_and_no_key_is_lost(scene: Scene) -> None:
    """A key that was free for a moment would let one of those run who call for it, beside the run that had it."""
    place = scene.place

    @only_one("{key}", lease=LEASE)
    def get(key: str) -> bool:
        place.witness.append(key, "start")
        return True

    def contend(key: str) -> int:
        assert eventually(lambda: place.witness.notes(key))
        calls, until = 0, time.monotonic() + LIMIT
        while not get(key) and time.monotonic() < until:
            calls += 1
            time.sleep(0.01)
        return calls

    with ExitStack() as stack, ThreadPoolExecutor(len(KEYS)) as pool:
        for key in KEYS:
            command = [sys.executable, "-m", "tests.live.test_ten_leases", key]
            stack.enter_context(Guarded(command, cwd=ROOT, env=place.environment))
        counts = list(pool.map(contend, KEYS))
    for key, count in zip(KEYS, counts, strict=True):
        start, end, later = place.witness.notes(key)
        assert [each.rest for each in (start, end, later)] == [["start"], ["end"], ["start"]], key
        assert end.at - start.at >= LEASES * LEASE, key
        assert count > 10 * LEASES, key


if __name__ == "__main__":
    configure(redis=os.environ[URL], prefix=PREFIX)
    if sys.argv[1].startswith("asyncio"):
        asyncio.run(run_async(sys.argv[1]))
    else:
        run(sys.argv[1])
