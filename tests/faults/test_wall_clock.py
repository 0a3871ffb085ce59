"""A holder whose wall clock is set back and forth: nothing depends on it."""

from __future__ import annotations

from typing import Any

from only_one import only_one
from only_one.holder import Holder as HolderOf
from tests.faults.programs import Program

# The clock is the process's own: to set the machine's would harm all that runs beside the test.
CLOCK = """
import json, sys, threading, time
offset, real, real_ns = 0.0, time.time, time.time_ns
time.time = lambda: real() + offset
time.time_ns = lambda: real_ns() + int(offset * 1e9)

import only_one
from tests.renewal import is_renewed
url, prefix = sys.argv[1:]
DAY = 86_400.0

def set_clock():
    global offset
    offset = DAY if offset < 0 else -365 * DAY  # back and forth

def keep_setting():
    while True:
        set_clock()
        time.sleep(0.01)

threading.Thread(target=keep_setting, daemon=True).start()
while not offset:
    time.sleep(0.001)
only_one.configure(redis=url, prefix=prefix)
told = {}

def cover(key, work, **options):
    def lost(error):
        told[key] = error.reason, time.monotonic()
    return only_one.only_one(key, when_lost=lost, **options)(work)()

def renew():
    lock = only_one.current_lock()
    lefts = [lock.expires_in]
    for _ in range(20):
        assert is_renewed(lock)
        lefts.append(lock.expires_in)
    print(json.dumps(lefts), flush=True)
    return lock.is_held

def overrun():
    lock = only_one.current_lock()
    longest = lock.expires_in
    while "timeout" not in told:
        longest = max(longest, lock.expires_in)
        time.sleep(0.005)
    return lock.is_held, longest

print(json.dumps(cover("lease", renew, lease=600)), flush=True)
begun = time.monotonic()
held, longest = cover("timeout", overrun, timeout=1)
reason, moment = told.pop("timeout")
print(json.dumps([held, longest, reason, moment - begun]), flush=True)
cover("at_least", lambda: time.sleep(0.3), timeout=600, at_least=600)
print(json.dumps(told), flush=True)
cover("dead", lambda: print('"begun"', flush=True) or threading.Event().wait(), timeout=600)
"""


def test_nothing_depends_on_it(redis: Any, redis_url: str, prefix: str) -> None:
    with Program(CLOCK, redis_url, prefix) as program:
        # A lease is kept, and is as long as it is to be.
        assert all(0 < left <= 600 for left in program.says())
        assert program.says() is True
        # An overrun is told on time; by the wall clock, it would be at once or in a year.
        held, longest, reason, seconds = program.says()
        assert (held, reason) == (False, "overrun")
        assert longest <= 1.0
        assert seconds >= 1.0
        # A key is kept for as long as it is to be.
        assert program.says() == {}
        assert 300 < redis.pttl(f"{prefix}at_least") / 1000 <= 600 - 0.3
        assert b'"kept"' in redis.get(f"{prefix}at_least")
        assert only_one(lambda: "done", key="at_least")() is None
        # A dead holder is known, and one that lives is.
        assert program.says() == "begun"
        holder = HolderOf.parse(redis.get(f"{prefix}dead"))
        assert holder is not None
        assert holder.pid == program.pid
        call = only_one(lambda: "done", key="dead", timeout=600)
        assert call() is None
        program.kill()
    assert redis.get(f"{prefix}dead")
    assert call() == "done"
    assert not redis.exists(f"{prefix}lease", f"{prefix}timeout", f"{prefix}dead")
