"""Holders that stand still for longer than they may hold their keys."""

from __future__ import annotations

from typing import Any

from rigs.waiting import eventually
from tests.faults.programs import Program

LEASE = 3.0
"""Seconds that the holder stands still for, at the least: by its own clock its leases are over when it goes on."""

# All runs of one process, so that all leases run out in the time of one.
RUNS = """
import asyncio, json, sys, threading, time
import only_one
from only_one.errors import LockLost
from tests.renewal import is_renewed

url, prefix, lease = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)
begun = threading.Semaphore(0)
others_know = threading.Event()

def say(*what):
    print(json.dumps(what) + "\\n", end="", flush=True)  # at once: several threads do

def run(key):
    def tell(lost):
        say(key, "told", lost.reason, threading.current_thread().name)

    times = {"lease": 3600 if key == "kept" else float(lease)}
    if "timeout" in key:
        times = {"timeout": float(lease)}

    @only_one.only_one(key, when_lost=only_one.fail if "fails" in key else tell, **times)
    def work():
        lock = only_one.current_lock()
        begun.release()
        if key == "kept":
            others_know.wait()
            return is_renewed(lock)
        while lock.is_held:
            time.sleep(0.005)
        return False

    @only_one.only_one(key, when_lost=only_one.fail, **times)
    async def work_async():
        begun.release()
        await asyncio.sleep(3600)

    try:
        say(key, "returned", asyncio.run(work_async()) if "async" in key else work())
    except LockLost as error:
        say(key, "raised", error.reason)

KEYS = ["lease", "timeout", "free", "kept", "lease fails", "timeout fails", "lease fails async", "timeout fails async"]
threads = {key: threading.Thread(target=run, args=[key]) for key in KEYS}
for thread in threads.values():
    thread.start()
for _ in threads:
    begun.acquire()
say("all have begun", *KEYS)
kept = threads.pop("kept")
for thread in threads.values():
    thread.join()
others_know.set()
kept.join()
"""


def test_a_paused_holder_is_told_that_it_has_lost(redis: Any, redis_url: str, prefix: str) -> None:
    """Once, in another thread than the one that renews; and what it releases is not the next one's."""
    with Program(RUNS, redis_url, prefix, str(LEASE)) as holder:
        reports = [holder.says()]
        while reports[-1][0] != "all have begun":  # and some are over, on a slow machine
            reports.append(holder.says())
        _, *keys = reports.pop()
        holder.stop()
        kept = redis.get(f"{prefix}kept")
        redis.pexpire(f"{prefix}kept", 600_000)
        lost = [key for key in keys if key != "kept"]
        assert eventually(lambda: not redis.exists(*(prefix + key for key in lost)))
        taken = [key for key in lost if key != "free"]
        for key in taken:
            redis.set(f"{prefix}{key}", "the next one")
        holder.resume()
        said: dict[str, list[Any]] = {key: [] for key in keys}
        for key, *what in reports + holder.rest():
            said[key].append(what)
    assert kept
    # Nobody acquires again what nobody has taken, and a lease that is not over is kept.
    assert [redis.get(f"{prefix}{key}") for key in taken] == [b"the next one"] * len(taken)
    assert not redis.exists(f"{prefix}free", f"{prefix}kept")
    assert said.pop("kept") == [["returned", True]]
    for key, what in said.items():
        by_now = {"overrun"} if "timeout" in key else {"expired", "taken", "deleted"}
        if "fails" in key:
            ((how, reason),) = what
            assert how == "raised"
        else:
            ((_, reason, thread),) = [each for each in what if each[0] == "told"]
            assert [each for each in what if each[0] != "told"] == [["returned", False]]
            assert thread != "only_one-leases"
        assert reason in by_now, key
