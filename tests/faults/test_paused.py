"""Holders that stand still for longer than they may hold their keys."""

from __future__ import annotations

from typing import Any

from rigs.waiting import eventually
from tests.faults.programs import Program

LEASE = 3.0
"""Seconds that the holder stands still for, at the least: by its own clock its leases are over when it goes on."""

RUNS = """
import json, sys, threading
import only_one
from rigs.waiting import eventually
from tests.faults.programs import Running, RunningAsync

url, prefix, lease = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)
told = []

def tell(lost):
    told.append([lost.key.removeprefix(prefix), lost.reason, threading.current_thread().name])

runs = [
    Running("lease", lease=float(lease), when_lost=tell),
    Running("timeout", timeout=float(lease), when_lost=tell),
    RunningAsync("fails", lease=float(lease), when_lost=only_one.fail),
]
for run in runs:
    run.__enter__()
print(json.dumps("begun"), flush=True)
for run in runs[:2]:  # the last one is cancelled
    eventually(lambda: not run.lock.is_held)
    run.finish.set()
*results, failed = [run.join() for run in runs]
print(json.dumps([results, failed.reason, told]), flush=True)
"""


def test_a_paused_holder_is_told_that_it_has_lost(redis: Any, redis_url: str, prefix: str) -> None:
    """Once, in another thread than the one that renews; and what it releases is not the next one's."""
    keys = [f"{prefix}{key}" for key in ("lease", "timeout", "fails")]
    with Program(RUNS, redis_url, prefix, str(LEASE)) as holder:
        assert holder.says() == "begun"
        holder.stop()
        assert eventually(lambda: not redis.exists(*keys))
        redis.mset(dict.fromkeys(keys, "the next one"))
        holder.resume()
        results, reason, told = holder.says()
    assert redis.mget(keys) == [b"the next one"] * 3
    assert results == ["done", "done"]
    by_lease = {"expired", "taken", "deleted"}
    assert reason in by_lease
    assert sorted(key for key, *_ in told) == ["lease", "timeout"]
    assert all(reason in (by_lease if key == "lease" else {"overrun"}) for key, reason, _ in told)
    assert "only_one-leases" not in {thread for *_, thread in told}
