"""Under gevent: the thread that renews is one of the system's, which greenlets that compute do not starve."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from only_one.testing import guarded, redis_server
from tests.waiting import LIMIT, eventually
from tests.watching import assert_kept, watched

pytest.importorskip("gevent")

LEASE = 1.0
HEAD = """
from gevent import monkey
monkey.patch_all()
import sys, time
import gevent, redis
import only_one
url, prefix, lease = sys.argv[1], sys.argv[2], float(sys.argv[3])
only_one.configure(redis=url, prefix=prefix)
"""


def program(text: str, *arguments: str) -> list[str]:
    """The command that runs a program under gevent; warnings of gevent's own, of which some Pythons have some, pass."""
    return [sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(text), *arguments]


COMPUTES = """
enough = [False]

def compute():
    while not enough[0]:
        sum(range(20_000))
        gevent.sleep(0)

def hog():
    # Not once does it let another greenlet run.
    until = time.monotonic() + 3 * lease
    while time.monotonic() < until:
        sum(range(20_000))

@only_one.only_one("waits", lease=lease)
def waits():
    until = time.monotonic() + 10 * lease
    while time.monotonic() < until:
        gevent.sleep(0.05)
    return only_one.current_lock().is_held

@only_one.only_one("hogs", lease=lease)
def hogs():
    gevent.sleep(lease)
    hog()
    gevent.sleep(6 * lease)
    return only_one.current_lock().is_held

runs = [gevent.spawn(waits), gevent.spawn(hogs)]
others = [gevent.spawn(compute) for _ in range(2)]
gevent.joinall(runs)
enough[0] = True
gevent.joinall(others)
print(*[run.value for run in runs], flush=True)
"""


def test_runs_of_ten_leases_beside_greenlets_that_compute(redis: Any, redis_url: str, prefix: str) -> None:
    command = program(COMPUTES, redis_url, prefix, str(LEASE))
    keys = [f"{prefix}waits", f"{prefix}hogs"]
    with guarded(command, stdout=subprocess.PIPE, text=True) as running:
        stdout = running.guardian.stdout
        assert stdout is not None
        assert eventually(lambda: redis.exists(*keys) == 2)
        with watched(redis_url, *keys) as seen:
            time.sleep(8 * LEASE)
        assert_kept(seen, keys, LEASE)
        assert stdout.readline() == "True True\n"
        assert running.wait(LIMIT) == 0
    assert redis.exists(*keys) == 0


OUTAGE = """
@only_one.only_one("k", timeout=600)
def run():
    print("begun", flush=True)
    sys.stdin.readline()
    return "done"

print(run(), flush=True)
client = redis.Redis.from_url(url)
until = time.monotonic() + 10
sys.stdin.readline()
while client.exists(prefix + "k") and time.monotonic() < until:
    gevent.sleep(0.01)
print(client.exists(prefix + "k"), run.__name__, flush=True)
"""


@pytest.mark.usefixtures("prefix")
def test_what_could_not_be_released_is_released_in_the_background(prefix: str) -> None:
    with redis_server() as server:
        command = program(OUTAGE, server.url, prefix, "1")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **pipes) as running:
            try:
                assert running.stdin is not None
                assert running.stdout is not None
                assert running.stdout.readline() == "begun\n"
                server.pause()
                running.stdin.write("end\n")
                running.stdin.flush()
                assert running.stdout.readline() == "done\n"
                server.resume()
                out = running.communicate("look\n", timeout=30)[0]
                assert out == "0 run\n"
                assert running.returncode == 0
            finally:
                server.resume()
                running.kill()


ENDS = """
@only_one.only_one("k", lease=lease)
def run():
    gevent.sleep(2 * lease)
    return only_one.current_lock().is_held

print(gevent.spawn(run).get(), flush=True)
if sys.argv[4] == "holds":
    gevent.spawn(run)
    gevent.sleep(0.5)
"""


@pytest.mark.parametrize("how", ["holds nothing", "holds"])
def test_it_ends(redis: Any, redis_url: str, prefix: str, how: str) -> None:
    """At once, whether or not a greenlet holds a key; and the key is free within the lease."""
    command = program(ENDS, redis_url, prefix, "0.4", how)
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert not done.stderr
    assert time.monotonic() - began < 15
    assert eventually(lambda: not redis.exists(f"{prefix}k"), 2)


THREADS = """
@only_one.only_one("{number}", lease=lease)
def run(number):
    gevent.sleep(4 * lease)
    return only_one.current_lock().is_held

runs = [gevent.spawn(run, number) for number in range(50)]
gevent.sleep(lease)
print(len(__import__("os").listdir("/proc/self/task")), flush=True)
gevent.joinall(runs)
print(sum(run.value is True for run in runs), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads of the system cannot be counted")
def test_many_greenlets_share_one_thread_of_the_system(prefix: str) -> None:
    with redis_server() as server, redis_py.Redis.from_url(server.url) as client:
        # By the socket's path, as gevent has threads of its own that look up names.
        command = program(THREADS, f"unix://{server.unix_socket}", prefix, "0.5")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout.split() == ["2", "50"]
        assert not client.dbsize()


APP = """
import os
import gevent
import redis
from celery import Celery
import only_one

app = Celery("under_gevent", broker=os.environ["GEVENT_URL"], backend=os.environ["GEVENT_URL"])
app.conf.broker_connection_retry_on_startup = True
only_one.configure(redis=os.environ["GEVENT_URL"])

@app.task
@only_one.only_one("long", lease=1)
def long():
    from gevent import monkey
    client = redis.Redis.from_url(os.environ["GEVENT_URL"])
    client.rpush("begun", 1)
    gevent.sleep(3)
    client.rpush("ended", 1)
    return only_one.current_lock().is_held and monkey.is_module_patched("threading")
"""


def test_a_worker(tmp_path: Path) -> None:
    (tmp_path / "under_gevent.py").write_text(APP)
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "celery",
        "-A",
        "under_gevent",
        "worker",
        "-P",
        "gevent",
        "-c",
        "10",
    ]
    with redis_server() as server, redis_py.Redis.from_url(server.url) as client, log.open("wb") as output:
        environment = {**os.environ, "GEVENT_URL": server.url, "PYTHONPATH": str(tmp_path)}
        with guarded(command, cwd=tmp_path, env=environment, stdout=output, stderr=output):
            from celery import Celery  # noqa: PLC0415 - its own application, for the length of the test

            with Celery("sender", broker=server.url, backend=server.url, set_as_current=False) as sender:
                answer = sender.send_task("under_gevent.long")
                assert eventually(lambda: client.exists("only_one:long"), 30), log.read_text()[-2000:]
                with watched(server.url, "only_one:long") as seen:
                    skipped = [sender.send_task("under_gevent.long") for _ in range(5)]
                    assert [each.get(timeout=LIMIT) for each in skipped] == [None] * 5
                    began = time.monotonic()
                    while not client.exists("ended") and time.monotonic() < began + 2.5:
                        time.sleep(0.01)
                assert_kept(seen, ["only_one:long"], 1)
                assert answer.get(timeout=LIMIT) is True
                assert client.llen("begun") == client.llen("ended") == 1
                assert not client.exists("only_one:long")
