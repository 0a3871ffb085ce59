"""Under gevent and eventlet: the thread that renews is one of the system's, which greenlets that compute do not starve.

A worker of Celery's with each of them is among those of `tests/live/test_pools.py`.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis as redis_py

from only_one import only_one
from rigs.servers import RedisServer
from rigs.waiting import LIMIT

pytest.importorskip("gevent")

GEVENT = """
from gevent import monkey
monkey.patch_all()
import gevent, gevent.event
"""
EVENTLET = """
import eventlet
eventlet.monkey_patch()
"""
HEAD = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import redis
import only_one
from tests.renewal import renew_now
from rigs.waiting import LIMIT, eventually
url, prefix, *rest = sys.argv[1:]
only_one.configure(redis=url, prefix=prefix)
client = redis.Redis.from_url(url)
begun, told = [], []
"""


def said(under: str, program: str, *arguments: str) -> list[str]:
    """What a program says under gevent or eventlet; warnings of their own pass."""
    command = [sys.executable, "-W", "ignore", "-c", under + HEAD + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    return done.stdout.split()


RENEWED = """
enough = threading.Event()

@only_one.only_one("{number}", lease=60, when_lost=told.append)
def run(number):
    begun.append(only_one.current_lock())
    enough.wait()
    return only_one.current_lock().is_held

green = ThreadPoolExecutor(50)  # whose threads are greenlets, as both make them
runs = [green.submit(run, number) for number in range(50)]
eventually(lambda: len(begun) == 50)
before = [lock.expires_at for lock in begun]
renew_now(*begun)
until = time.monotonic() + LIMIT
# Not once does it let another greenlet run.
while not all(lock.expires_at > was for lock, was in zip(begun, before)) and time.monotonic() < until:
    sum(range(20_000))
print(sum(lock.expires_at > was for lock, was in zip(begun, before)))
client.delete(begun[0].key)
renew_now(begun[0])
eventually(lambda: told)
print(*[error.reason for error in told])
enough.set()
print(sum(run.result() for run in runs))
enough.clear()
threading.Thread(target=run, args=("last",), daemon=True).start()
eventually(lambda: len(begun) == 51)
"""


@pytest.mark.parametrize("under", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])
def test_greenlets_that_hold_keys(server: RedisServer, prefix: str, under: str) -> None:
    """They are renewed while none of them gets a turn; the process ends though one holds a key."""
    assert said(under, RENEWED, server.url, prefix) == ["50", "deleted", "49"]
    with redis_py.Redis.from_url(server.url) as client:
        assert client.keys() == [f"{prefix}last".encode()]
    # Nobody renews it any more: it is a dead holder's.
    assert only_one(lambda: "done", key="last", lease=60)() == "done"


SLOW_TO_HEAR = """
go_on = monkey.get_original("_thread", "allocate_lock")()
go_on.acquire()
enough = gevent.event.Event()

def hear(lost):
    told.append(lost)
    go_on.acquire()  # of the thread, and not of a greenlet: none other has a turn in it

@only_one.only_one("{number}", lease=60, when_lost=hear)
def run(number):
    begun.append(only_one.current_lock())
    enough.wait()

runs = [gevent.spawn(run, number) for number in range(2)]
eventually(lambda: len(begun) == 2)
lost, kept = begun
client.delete(lost.key)
renew_now(lost)
print(eventually(lambda: told))
before = kept.expires_at
renew_now(kept)
print(eventually(lambda: kept.expires_at > before))
go_on.release()
enough.set()
gevent.joinall(runs)
"""


def test_what_when_lost_does_keeps_nobody_from_being_renewed(server: RedisServer, prefix: str) -> None:
    assert said(GEVENT, SLOW_TO_HEAR, server.url, prefix) == ["True", "True"]


ENDS_WHILE_IT_CONNECTS = """
import atexit
from eventlet.patcher import original
native, sleep = original("_thread"), original("time").sleep
main, connects, go_on = native.get_ident(), native.allocate_lock(), native.allocate_lock()
connects.acquire()
go_on.acquire()

class Connection(redis.Connection):
    def __init__(self, **options):
        if native.get_ident() != main:  # in the thread that renews, whose pool is locked now
            connects.release()
            go_on.acquire()
            sleep(0.3)
        super().__init__(**options)

pool = redis.ConnectionPool.from_url(url, connection_class=Connection)
call = eventlet.spawn(only_one.only_one(lambda: None, key="k", redis=redis.Redis(connection_pool=pool)))
eventlet.sleep(0)
call.kill()  # while it acquires the key, so that there is something to release in the background
connects.acquire()
atexit.register(go_on.release)
print("ends")
"""


def test_a_process_under_eventlet_that_ends_with_pending_releases(server: RedisServer, prefix: str) -> None:
    """A greenlet that waits for a lock of another thread's is never woken."""
    assert said(EVENTLET, ENDS_WHILE_IT_CONNECTS, server.url, prefix) == ["ends"]


TIME_IS_OVER = """
from only_one.testing import redis_server

class TimeIsOver(Exception):
    pass

gevent = sys.modules.get("gevent")
begin_limit = gevent.Timeout.start_new if gevent else eventlet.Timeout
with redis_server() as server, redis.Redis(port=server.port, socket_timeout=LIMIT) as client:
    @only_one.only_one("k", redis=client)
    def run():
        client.client_pause(int(LIMIT * 1000), all=False)  # so that the release waits
        begin_limit(0.1, TimeIsOver())

    try:
        print(run())
    except TimeIsOver:
        client.client_unpause()
        print(eventually(lambda: not client.exists(prefix + "k")))
"""


@pytest.mark.parametrize("under", [GEVENT, EVENTLET], ids=["gevent", "eventlet"])
def test_a_time_limit_of_a_greenlet_that_is_over_during_a_release_reaches_the_caller(prefix: str, under: str) -> None:
    """And the key is freed, of a server that a user's tests start under gevent, too."""
    assert said(under, TIME_IS_OVER, "redis://", prefix) == ["True"]
