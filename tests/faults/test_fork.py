"""Processes that fork while they hold a key, at the worst moment."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.faults.programs import Program
from tests.proxy import Proxy
from tests.waiting import LIMIT, eventually

# A child that is forked while another thread is in coverage's lock waits for it for ever.
pytestmark = pytest.mark.interrupts

FORKS = """
import asyncio, json, os, signal, sys, time
import only_one
url, prefix, way, lease = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)
mine = os.getpid()
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))

def say(*what):
    print(json.dumps(what), flush=True)

def wait(seconds, until=lambda: False):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not until():
        time.sleep(0.005)
    return until()

@only_one.only_one("child", lease=float(lease))
def child():
    say("child", os.getpid())
    wait(60, lambda: len(asked) > 1)  # told to end, or ended with the parent
    return only_one.current_lock().is_held

def body():
    say("parent", mine)
    assert wait(60, lambda: asked)
    if os.fork():
        wait(60)
        return "parent's"
    return child()

@only_one.only_one("parent", lease=float(lease))
def parent():
    return body()

@only_one.only_one("parent", lease=float(lease))
async def parent_async():
    return body()

result = asyncio.run(parent_async()) if way == "async" else parent()
say("returned", result, os.getpid() == mine)
"""


@pytest.mark.parametrize(("moment", "way"), [("holding", "sync"), ("renewing", "sync"), ("renewing", "async")])
def test_a_fork_in_the_middle(redis: Any, redis_url: str, prefix: str, way: str, moment: str) -> None:
    """The child does its own work with its own key, and neither renews nor releases what is the parent's."""
    lease = 0.9
    with Proxy(redis_url) as proxy, Program(FORKS, proxy.url, prefix, way, str(lease)) as program:
        assert program.says() == ["parent", program.pid]
        held = proxy.hold_up("EVAL") if moment == "renewing" else None
        if held is not None:
            assert held.met.wait(LIMIT)  # the thread that renews waits for the answer
        program.process.signal(signal.SIGUSR1)
        what, child = program.says()
        assert what == "child"
        assert child != program.pid
        if held is not None:
            held.let_go()
        # Both are renewed, each by its own process.
        assert not eventually(lambda: redis.exists(f"{prefix}parent", f"{prefix}child") < 2, 1.2 * lease)
        # Where the parent does not renew, nobody does.
        program.stop()
        assert eventually(lambda: not redis.exists(f"{prefix}parent"))
        assert not eventually(lambda: not redis.exists(f"{prefix}child"), lease)
        # The child returns from the parent's run, and takes nothing with it.
        redis.set(f"{prefix}parent", "the next one")
        os.kill(child, signal.SIGUSR1)
        assert eventually(lambda: not redis.exists(f"{prefix}child"))
        assert program.says() == ["returned", True, False]
        assert redis.get(f"{prefix}parent") == b"the next one"


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_child_that_ends_releases_nothing_of_its_parent(redis: Any, redis_url: str, prefix: str, way: str) -> None:
    with Program(FORKS, redis_url, prefix, way, "30") as program:
        assert program.says()[0] == "parent"
        token = redis.get(f"{prefix}parent")
        program.process.signal(signal.SIGUSR1)
        what, *child = program.says()
        assert (what, len(child)) == ("child", 1), child
        os.kill(child[0], signal.SIGUSR1)
        assert program.says() == ["returned", True, False]
        assert eventually(lambda: not redis.exists(f"{prefix}child"))
        assert redis.get(f"{prefix}parent") == token
