"""Holders that stand still for longer than they may hold their keys."""

from __future__ import annotations

from typing import Any

from rigs.waiting import eventually
from tests.faults.programs import Program

LEASE = 3.0
"""Seconds that the holder stands still for, at the least: by its own clock its leases are over when it goes on."""

# All runs of one process, so that all leases run out in the time of one.
RUNS = """
import json, sys, threading
import only_one
from rigs.waiting import eventually
from tests.faults.programs import Running, RunningAsync
from tests.renewal import is_renewed

url, prefix, seconds = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)
told = []

def tell(lost):
    told.append([lost.key.removeprefix(prefix), lost.reason, threading.current_thread().name])

kept = Running("kept", lease=3600, when_lost=tell)
runs = {}
for times in ("lease", "timeout"):
    options = {times: float(seconds)}
    runs[f"{times} free"] = Running(f"{times} free", when_lost=tell, **options)
    runs[f"{times} told"] = Running(f"{times} told", when_lost=tell, **options)
    runs[f"{times} fails"] = Running(f"{times} fails", when_lost=only_one.fail, **options)
    runs[f"{times} fails async"] = RunningAsync(f"{times} fails async", when_lost=only_one.fail, **options)
for run in (kept, *runs.values()):
    run.__enter__()
print(json.dumps([*runs]), flush=True)
for key, run in runs.items():
    if "async" not in key:  # which is cancelled
        eventually(lambda: not run.lock.is_held)
        run.finish.set()
    run.join()
is_kept = is_renewed(kept.lock)
kept.__exit__()
results = {key: getattr(run.result, "reason", run.result) for key, run in runs.items()}
print(json.dumps([is_kept, kept.result, results, told]), flush=True)
"""


def test_a_paused_holder_is_told_that_it_has_lost(redis: Any, redis_url: str, prefix: str) -> None:
    """Once, in another thread than the one that renews; and what it releases is not the next one's."""
    with Program(RUNS, redis_url, prefix, str(LEASE)) as holder:
        lost = holder.says()
        holder.stop()
        redis.pexpire(f"{prefix}kept", 600_000)
        assert eventually(lambda: not redis.exists(*(f"{prefix}{key}" for key in lost)))
        taken = [f"{prefix}{key}" for key in lost if "free" not in key]
        for key in taken:
            redis.set(key, "the next one")
        holder.resume()
        is_kept, result, results, told = holder.says()
    # Nobody acquires again what nobody has taken, and a lease that is not over is kept.
    assert [redis.get(key) for key in taken] == [b"the next one"] * len(taken)
    assert not redis.exists(*(f"{prefix}{key}" for key in ("kept", "lease free", "timeout free")))
    assert (is_kept, result) == (True, "done")
    assert sorted(key for key, *_ in told) == sorted(key for key in lost if "fails" not in key)
    assert "only_one-leases" not in {thread for *_, thread in told}
    reasons = {key: reason for key, reason, _ in told} | {key: results[key] for key in lost if "fails" in key}
    for key, reason in reasons.items():
        assert reason in ({"overrun"} if "timeout" in key else {"expired", "taken", "deleted"}), key
    assert {results[key] for key in lost if "fails" not in key} == {"done"}
