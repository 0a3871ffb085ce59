"""A holder that stands still for longer than it may hold its key; the simulated world pauses all kinds of holders."""

from __future__ import annotations

from typing import Any

from rigs.waiting import eventually
from tests.faults.programs import Program

LEASE = 3.0
"""Seconds that the holder stands still for, at the least: by its own clock its lease is over when it goes on."""

RUN = """
import json, sys, threading
import only_one
from rigs.waiting import eventually

url, key, lease = sys.argv[1:]
told = []

def tell(lost):
    told.append([lost.key, lost.reason, threading.current_thread().name])

@only_one.only_one(key, lease=float(lease), when_lost=tell)
def run():
    print(json.dumps("begun"), flush=True)
    return eventually(lambda: told)

only_one.configure(redis=url, prefix="")
print(json.dumps([run(), told]), flush=True)
"""


def test_a_paused_holder_is_told_that_it_has_lost(redis: Any, redis_url: str, key: str) -> None:
    """Once, in another thread than the one that renews; and what it releases is not the next one's."""
    with Program(RUN, redis_url, key, str(LEASE)) as holder:
        assert holder.says() == "begun"
        holder.stop()
        assert eventually(lambda: not redis.exists(key))
        redis.set(key, "the next one")
        holder.resume()
        result, told = holder.says()
    assert redis.get(key) == b"the next one"
    assert result is True
    ((lost, reason, thread),) = told
    assert lost == key
    assert reason in {"expired", "taken", "deleted"}
    assert thread != "only_one-leases"
