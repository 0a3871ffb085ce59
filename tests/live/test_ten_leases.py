"""Runs that are ten leases long, whatever they do and wherever, while others call for their keys all the time."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from only_one.testing import Guarded
from rigs.waiting import eventually
from tests.live.ten_leases_app import LEASE, LEASES, task
from tests.live.workers import ROOT, World

pytest.importorskip("gevent")

APP = "tests.live.ten_leases_app"
# Those who compute have a core each.
TOGETHER = [
    ["threads IO", "asyncio IO", "prefork IO", "gevent IO", "threads CPU", "prefork CPU"],
    ["asyncio CPU", "gevent CPU"],
]
POOLS = {"prefork": 4, "gevent": 10}


def begin(key: str, place: World, stack: ExitStack) -> None:
    """Have a run begin where it belongs."""
    where, _, _ = key.partition(" ")
    if where in POOLS:
        # The second is skipped; a greenlet that computes would have it wait until the first has ended.
        for _ in range(1 if key == "gevent CPU" else 2):
            task.apply_async([key], queue=where)
    else:
        stack.enter_context(Guarded([sys.executable, "-m", APP, where, key], cwd=ROOT, env=place.environment))


@pytest.mark.soak
def test_nothing_overlaps_and_no_key_is_lost(place: World) -> None:
    """A key that was free for a moment would let one of those run who call for it, beside the run that had it."""
    calls: dict[str, int] = {}
    with ExitStack() as workers:
        for pool, size in POOLS.items():
            workers.enter_context(place.worker("-Q", pool, "-c", str(size), module=APP, pool=pool))
        for keys in TOGETHER:
            with ExitStack() as stack:
                for key in keys:
                    begin(key, place, stack)
                assert eventually(lambda keys=keys: all(place.witness.notes(*key.split()) for key in keys))  # type: ignore[misc]
                contend = [sys.executable, "-m", APP, "contend", *keys]
                pipe: Any = {"env": place.environment, "stdout": subprocess.PIPE, "text": True}
                others = stack.enter_context(Guarded(contend, cwd=ROOT, **pipe))
                assert others.stdout is not None
                calls.update(zip(keys, map(int, others.stdout.readline().split()), strict=True))
    for key, count in calls.items():
        start, end, *later = place.witness.notes(*key.split())
        leases = (end.at - start.at) / LEASE
        print(f"{key}: {leases:.1f} leases, {count} calls")
        assert leases >= LEASES, key
        assert count > 10 * LEASES, key
        # The run, which still had its key at its end, and after it one of those who had called for the key.
        assert [each.rest for each in (start, end, *later)] == [["start"], ["end"]] * 2, key
        assert start.pid == end.pid != later[0].pid, key
    assert len(calls) == 8
