"""Processes that fork while they hold a key, at the worst moment."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from only_one import forks
from only_one.lock import commands
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Program

# A child that is forked while another thread is in coverage's lock waits for it for ever.
pytestmark = pytest.mark.interrupts

IN_A_CHILD: dict[str, str] = {
    "while another thread looks a server up, configures, or asks a Sentinel": """
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
import redis.sentinel
from only_one import configure, settings
from only_one.connections.server import find_server

sentinel = redis.sentinel.Sentinel([])
sentinel.sentinels = [redis.Redis.from_url(sys.argv[1])]
servers = [find_server(source) for source in (sys.argv[1], sentinel.master_for("m"))]
clients = [server.client for server in servers]
asked = clients[1].connection_pool.sentinel_manager.sentinels
pools = [client.connection_pool for client in (*clients, *asked, *sentinel.sentinels)]
locks = [settings._lock, *(pool._lock for pool in pools), *(pool._fork_lock for pool in pools)]
locks += [pool._event_dispatcher._lock for pool in pools if hasattr(pool, "_event_dispatcher")]
for lock in locks:
    ThreadPoolExecutor(1).submit(lock.acquire).result()

def is_well():
    find_server(sys.argv[1] + "?db=1")
    configure(timeout=1)
    with suppress(redis.RedisError):  # it is no Sentinel
        clients.pop().send_raw(("PING",))
    return all(client.send_raw(("PING",)) for client in clients)
""",
    # Else each would read the other's replies.
    "connections of its own in the event loop of its parent": """
import asyncio
from only_one.connections.server import find_server

server, loop = find_server(sys.argv[1]), asyncio.new_event_loop()
parents = loop.run_until_complete(server.async_client())

def is_well():
    return loop.run_until_complete(server.async_client()) is not parents
""",
    "a mark of its own though it has its parent's process id, as the first of a namespace may": """
os.getpid = lambda: 1
from only_one.lock.token import this_process

parents = this_process().mark

def is_well():
    return this_process().mark != parents
""",
    "connections of its own when it looks at keys, though C code has forked it, of which Python knows nothing": """
import ctypes
from only_one.connections.server import find_server
from only_one.inspection import release_key

os.fork = ctypes.PyDLL(None).fork

def ports():
    release_key("k", "the value of nobody", redis=sys.argv[1])
    return {each._sock.getsockname() for each in find_server(sys.argv[1]).client.idle}

parents = ports()

def is_well():
    return ports().isdisjoint(parents)
""",
}
FORK = """
pid = os.fork()
signal.alarm(100)
if not pid:
    os._exit(7 if is_well() else 8)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("program", IN_A_CHILD.values(), ids=IN_A_CHILD)
def test_what_a_forked_child_can_do(redis_url: str, program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", f"import os, signal, sys\n{program}{FORK}", redis_url]
    assert subprocess.run(command, check=False).returncode == 7


def test_of_the_threads_that_see_a_fork_at_once_one_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the later one would clear what the first call has begun."""
    came: list[object] = []
    begun: list[object] = []

    def begin_anew() -> None:
        begun.append(None)
        assert eventually(lambda: len(came) == 2)

    def see_fork(_: int) -> None:
        came.append(None)
        forks.see_fork()

    monkeypatch.setattr(forks, "_in_each_child", [begin_anew])
    monkeypatch.setattr(forks, "_pid", 0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(see_fork, range(2)))
    assert len(begun) == 1


NOT_LINUX = """
import os, threading, time
import redis.cluster, redis.asyncio  # which may not do without
del os.register_at_fork, time.CLOCK_BOOTTIME
import only_one
from only_one.lock import commands
assert commands.now is time.monotonic
assert threading.active_count() == 1  # the thread that renews is started by the first lease
"""


def test_where_nothing_forks_and_there_is_one_clock_less() -> None:
    """It can be imported there; and where there is a clock that runs on through suspend, it is that."""
    subprocess.run([sys.executable, "-c", NOT_LINUX], check=True)
    assert not hasattr(time, "CLOCK_BOOTTIME") or commands.now.args == (time.CLOCK_BOOTTIME,)  # type: ignore[attr-defined]


# Parent and child do what they are told by lists of their own, until they are told to end.
FORKS = """
import ctypes, json, os, sys
import only_one, redis
from tests.decorated import decorated, decorated_async
from tests.renewal import is_awaited, renew_now
url, direct, prefix, way = sys.argv[1:]
if way == "by C code":
    os.fork = ctypes.PyDLL(None).fork
only_one.configure(redis=url, prefix=prefix)
mine = os.getpid()
locks = []

def say(*what):
    print(json.dumps(what), flush=True)

def obey(who):
    locks.append(only_one.current_lock())
    assert is_awaited(locks[-1])  # the thread that renews has connected
    say(who, os.getpid())
    with redis.Redis.from_url(direct, socket_timeout=None) as orders:
        while (order := orders.blpop(f"{prefix}to {who}")[1]) != b"end":
            if order == b"renew":
                assert is_awaited(locks[-1])  # or the answer to a renewal before it would take its place
                renew_now(*locks)
            elif not os.fork():
                return False
    return True

def child():
    obey("child")
    return only_one.current_lock().is_held

def parent():
    return "the parent's" if obey("parent") else decorated(child, "child", lease=600)()

decorate = decorated_async if way == "async" else decorated
say("returned", decorate(parent, "parent", lease=600)(), os.getpid() == mine)
"""


@pytest.mark.parametrize("way", ["sync", "async", "by C code"])
def test_a_fork_in_the_middle(redis: Any, redis_url: str, prefix: str, way: str) -> None:
    """Of a renewal: the child does its own work with its own key, and neither renews nor releases the parent's.

    C code forks so that Python's hooks do not see it, as uWSGI does.
    """

    def tell(who: str, order: str) -> None:
        redis.rpush(f"{prefix}to {who}", order)

    def is_renewed(who: str) -> bool:
        redis.pexpire(f"{prefix}{who}", 300_000)
        tell(who, "renew")
        return eventually(lambda: redis.pttl(f"{prefix}{who}") > 300_000)

    def is_renewed_by_nobody() -> bool:
        redis.pexpire(f"{prefix}parent", 300_000)
        assert is_renewed("child")
        return bool(redis.pttl(f"{prefix}parent") <= 300_000)

    with Proxy(redis_url) as proxy, Program(FORKS, proxy.url, redis_url, prefix, way) as program:
        assert program.says() == ["parent", program.pid]
        token = redis.get(f"{prefix}parent")
        held = proxy.hold_up("EVAL", times=sys.maxsize)
        tell("parent", "renew")
        assert held.met.wait(LIMIT)  # the thread that renews waits for the answer
        # Where C code forks beside a thread that waits for Python's lock, the child waits for it for ever.
        assert program.all_sleep()
        tell("parent", "fork")
        assert program.says()[0] == "child"
        held.left = 0
        held.let_go()
        # Both are renewed, each by its own process.
        assert is_renewed("parent")
        assert is_renewed("child")
        # A grandchild that makes no call of its own returns from both runs, and takes nothing with it.
        tell("child", "fork")
        assert program.says() == ["returned", True, False]
        assert redis.exists(f"{prefix}child", f"{prefix}parent") == 2
        # Where the parent does not renew, nobody does, though the child is told to each time.
        program.stop()
        assert eventually(is_renewed_by_nobody)  # what the parent has sent may be on its way
        # The child returns from the parent's run, and takes nothing with it.
        tell("child", "end")
        assert program.says() == ["returned", True, False]
        assert not redis.exists(f"{prefix}child")
        assert redis.get(f"{prefix}parent") == token
        program.resume()
        tell("parent", "end")
        assert program.says() == ["returned", "the parent's", True]
        assert not redis.exists(f"{prefix}parent")


LEAVES_A_RELEASE = """
import multiprocessing, sys
from only_one.clock import now
from only_one.connections.server import find_server
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.renewal import release_later
url, key, process = sys.argv[1:]

def leave_a_release():
    server = find_server(url)
    server.node_of(key).fail(600)  # the thread takes the server for down
    server.client.send_raw(("SET", key, key))
    release_later(PendingRelease(server, key, key.encode(), now() + 600, no_write_in_flight=True))

if process == "a child of multiprocessing":  # which ends past `atexit`
    child = multiprocessing.get_context("fork").Process(target=leave_a_release)
    child.start()
    child.join()
    sys.exit(child.exitcode)
leave_a_release()
"""


@pytest.mark.parametrize("process", ["a program", "a child of multiprocessing"])
def test_a_release_that_has_failed_is_finished_at_the_end_of(
    redis: Any, redis_url: str, prefix: str, process: str
) -> None:
    with Program(LEAVES_A_RELEASE, redis_url, f"{prefix}k", process) as program:
        assert program.line() == ""
    assert not redis.exists(f"{prefix}k")
