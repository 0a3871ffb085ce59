"""Holders whose wall clock is set back and forth: nothing depends on it."""

from __future__ import annotations

from typing import Any

import pytest

from only_one import only_one
from only_one.holder import Holder as HolderOf
from tests.faults.programs import SLACK, Program
from tests.waiting import eventually

DAY = 86_400

# The clock is the process's own: to set the machine's would harm all that runs beside the test.
CLOCK = """
import json, sys, time
offset, real, real_ns = 0.0, time.time, time.time_ns
time.time = lambda: real() + offset
time.time_ns = lambda: real_ns() + int(offset * 1e9)

import only_one
url, prefix, way, step = sys.argv[1:]
step = float(step)
told = []

def set_clock():
    global offset
    offset = step if offset == 0 else -offset  # back and forth

def lost(error):
    told.append((error.reason, time.monotonic()))

only_one.configure(redis=url, prefix=prefix)
OPTIONS = {"lease": {"lease": 0.6}, "timeout": {"timeout": 1.0}, "at_least": {"timeout": 600, "at_least": 1.5}}

@only_one.only_one("k", when_lost=lost, **OPTIONS[way])
def run():
    lock = only_one.current_lock()
    longest = lock.expires_in
    print(json.dumps(longest), flush=True)
    until = time.monotonic() + (0.3 if way == "at_least" else 2.0)
    while time.monotonic() < until:
        set_clock()
        longest = max(longest, lock.expires_in)
        if told:
            break
        time.sleep(0.02)
    return lock.is_held, longest

set_clock()
begun = time.monotonic()
held, longest = run()
print(json.dumps([held, longest, [(reason, at - begun) for reason, at in told], time.monotonic() - begun]), flush=True)
"""

steps = pytest.mark.parametrize("step", [DAY, -365 * DAY], ids=["forth", "back"])


@steps
def test_a_lease_is_kept(redis: Any, redis_url: str, prefix: str, step: float) -> None:
    with Program(CLOCK, redis_url, prefix, "lease", str(step)) as program:
        assert 0 < program.says() <= 0.6
        polls = 0
        while polls < 100:
            assert 0 < redis.pttl(f"{prefix}k") <= 600
            polls += 1
        held, longest, told, _ = program.says()
    assert held
    assert longest <= 0.6
    assert told == []
    assert not redis.exists(f"{prefix}k")


@steps
@pytest.mark.usefixtures("redis")
def test_an_overrun_is_told_on_time(redis_url: str, prefix: str, step: float) -> None:
    with Program(CLOCK, redis_url, prefix, "timeout", str(step)) as program:
        assert 0 < program.says() <= 1.0
        held, longest, told, _ = program.says()
    assert not held
    assert longest <= 1.0
    ((reason, seconds),) = told
    assert reason == "overrun"
    assert 1.0 <= seconds < 1.0 + SLACK


@steps
def test_a_key_is_kept_for_as_long_as_it_is_to_be(redis: Any, redis_url: str, prefix: str, step: float) -> None:
    with Program(CLOCK, redis_url, prefix, "at_least", str(step)) as program:
        program.says()
        held, _, told, took = program.says()
        assert held
        assert told == []
        left = redis.pttl(f"{prefix}k") / 1000
        assert 0 < left <= 1.5 - 0.3
        assert took < 1.5
    assert only_one(lambda: "done", key="k")() is None
    assert eventually(lambda: only_one(lambda: "done", key="k")() == "done", 1.5 + SLACK)


@steps
def test_a_dead_holder_is_known(redis: Any, redis_url: str, prefix: str, step: float) -> None:
    with Program(CLOCK, redis_url, prefix, "at_least", str(step)) as program:
        program.says()
        holder = HolderOf.parse(redis.get(f"{prefix}k"))
        assert holder is not None
        assert holder.pid == program.pid
        assert only_one(lambda: "done", key="k", timeout=600)() is None
        program.process.signal(9)
        program.process.wait(10)
    assert redis.pttl(f"{prefix}k") > 500_000
    assert only_one(lambda: "done", key="k", timeout=600)() == "done"
