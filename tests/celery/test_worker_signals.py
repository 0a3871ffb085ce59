"""What a worker does for runs that were killed, and for tasks that have not begun: by its signals, without a worker.

The former is done in threads, and the pool forks new children.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from celery.exceptions import WorkerLostError
from celery.signals import task_failure, task_postrun, task_revoked
from redis import Redis

from only_one import buffer_one, configure, only_one
from only_one.celery import ended_tasks
from only_one.celery.requeue import Header
from only_one.clock import now
from only_one.connections.server import find_server
from only_one.lock.token import TokenFactory, process_start
from rigs.waiting import LIMIT, eventually
from tests.proxy import Proxy

HOUR = 3600
PATIENCE = 10.0
"""Seconds for which the death of a process is waited for."""

cover: Any = only_one


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_no_child_is_forked_while_a_thread_is_at_work() -> None:
    begun, about_to_fork, forked = threading.Event(), threading.Event(), threading.Event()
    os.register_at_fork(before=about_to_fork.set, after_in_parent=forked.set)  # before it, the last comes first
    meanwhile = []

    def work() -> None:
        with ended_tasks._at_work:
            begun.set()
            assert about_to_fork.wait(LIMIT)
            meanwhile.append(forked.wait(0.2))  # at once, if the lock were not waited for

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(LIMIT)
    child = os.fork()
    if not child:
        is_free = ended_tasks._at_work.acquire(timeout=LIMIT)
        os._exit(0 if is_free else 1)
    thread.join()

    assert meanwhile == [False]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not ended_tasks._at_work.locked()


COVERS_A_FUNCTION = """
import sys
from only_one import only_one

def function(): ...

only_one(function, key="k")
assert "only_one.celery.ended_tasks" not in sys.modules
import celery
only_one(function, key="k")
assert "only_one.celery.ended_tasks" in sys.modules
"""


def test_a_worker_is_heeded_that_has_nothing_but_covered_functions() -> None:
    """It calls none of them, as that is for its children to do."""
    subprocess.run([sys.executable, "-c", COVERS_A_FUNCTION], check=True)


# --- keys of runs that were killed -------------------------------------------------------------------------------


@pytest.fixture
def app(redis_url: str, prefix: str) -> Iterator[Celery]:
    changes = {"broker_url": redis_url, "result_backend": "cache+memory://", "task_default_queue": f"{prefix}queue"}
    found = Celery(f"app-{uuid4()}", set_as_current=False, changes=changes)
    found.finalize()  # its tasks are no promises
    yield found
    found.close()


def work(key: str) -> str:
    return key


def a_task(app: Celery, **options: Any) -> Any:
    """A task whose run is covered."""
    return app.task(cover(**{"key": "{key}", **options})(work), name=f"task-{uuid4()}", shared=False)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed, and is not waited for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def held_by(pid: int, task_id: str = "mine", **changes: Any) -> bytes:
    """What a run in a process writes under its key."""
    value = json.loads(TokenFactory("task", task_id, 0).token(HOUR))
    value.update(pid=pid, process_start=process_start(pid), process="another", **changes)
    return json.dumps(value, separators=(",", ":")).encode()


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process, and leave it to its parent to wait for it."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def is_released(redis: Redis, redis_url: str, prefix: str) -> Callable[..., tuple[bool, bool]]:
    """Whether a key with a value is released, or is not the task's to release; and whether it is free then."""

    def look(value: bytes | None, *, takeover: bool = True) -> tuple[bool, bool]:
        key = f"{prefix}k"
        if value is not None:
            redis.set(key, value)
        done = ended_tasks._is_free(find_server(redis_url), key, "mine", takeover=takeover)
        return done, not redis.exists(key)

    return look


DONE, WAITS, LEFT = (True, True), (False, False), (True, False)


def test_a_key_is_released_when_its_process_is_dead(
    is_released: Callable[..., tuple[bool, bool]], child: subprocess.Popen[bytes]
) -> None:
    value, another = held_by(child.pid), held_by(child.pid, "another")
    elsewhere = held_by(child.pid, machine="elsewhere")
    assert is_released(None) == DONE
    assert is_released(value) == WAITS
    assert is_released(held_by(os.getppid())) == WAITS
    end(child)
    assert is_released(elsewhere) == WAITS
    assert is_released(another) == LEFT
    assert is_released(value, takeover=False) == LEFT
    assert is_released(value) == DONE
    assert is_released(value) == DONE  # it was not waited for
    assert child.wait() < 0
    assert is_released(another) == LEFT
    assert is_released(value) == DONE
    queued = TokenFactory("task", "mine", 0, "queued").token(HOUR)
    assert is_released(queued, takeover=False) == DONE


def test_its_death_is_waited_for(
    app: Celery, redis: Redis, prefix: str, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ten seconds, and not all the time."""
    task = a_task(app)
    redis.set(f"{prefix}k", held_by(child.pid))
    moments = [0.0, 0.0, PATIENCE - 1, PATIENCE]
    pauses: list[float] = []
    monkeypatch.setattr(ended_tasks, "now", lambda: moments.pop(0))
    monkeypatch.setattr(ended_tasks, "time", SimpleNamespace(sleep=pauses.append))
    ended_tasks._release_when_dead(task, task.run.__only_one__, "mine", ("k",), {}, None)
    assert not moments
    assert len(pauses) == 2
    assert redis.exists(f"{prefix}k")


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "only_one-endings"]


def test_a_worker_is_told_of_a_process_that_is_lost(
    app: Celery, redis: Redis, prefix: str, child: subprocess.Popen[bytes]
) -> None:
    task, spares = a_task(app, timeout=HOUR), a_task(app, takeover=False)
    tells: dict[str, Any] = {"task_id": "mine", "exception": WorkerLostError(), "kwargs": None}
    keys = [f"{prefix}{name}" for name in ("k", "error", "spared")]
    for key in keys:
        redis.set(key, held_by(child.pid))
    task_failure.send(sender=task, args=("k",), **tells)
    (thread,) = threads()
    assert thread.daemon
    end(child)
    assert eventually(lambda: not redis.exists(keys[0]))
    task_failure.send(sender=task, args=("error",), **{**tells, "exception": ValueError()})
    task_failure.send(sender=spares, args=("spared",), **tells)
    assert eventually(lambda: not threads())
    assert redis.exists(*keys) == 2


def test_the_key_of_a_lost_process_is_released_when_a_server_that_was_away_is_back(
    app: Celery, redis: Redis, redis_url: str, prefix: str, child: subprocess.Popen[bytes], caplog: Any
) -> None:
    task = a_task(app, timeout=HOUR)
    redis.set(f"{prefix}k", held_by(child.pid))
    end(child)
    with Proxy(redis_url) as proxy, configure(redis=proxy.url):
        with proxy.refused():
            task_failure.send(sender=task, task_id="mine", exception=WorkerLostError(), args=("k",), kwargs={})
            assert eventually(lambda: caplog.records)
        assert eventually(lambda: not redis.exists(f"{prefix}k"))


def test_a_worker_is_told_of_a_task_that_is_revoked(
    app: Celery, redis: Redis, prefix: str, child: subprocess.Popen[bytes]
) -> None:
    """One that waits has a key only where it is covered from when it is queued."""
    task = a_task(app)
    unique = cover("{key}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    end(child)
    keys = [f"{prefix}{name}" for name in ("waits", "runs", "queued", "changed")]
    for key in keys:
        redis.set(key, held_by(child.pid))

    def revoke(sender: Any, key: str, *, terminated: bool, **request: Any) -> None:
        found = {"id": "mine", "retries": 0, "args": (key,), "kwargs": {}, "headers": None, **request}
        task_revoked.send(sender=sender, request=SimpleNamespace(**found), terminated=terminated)
        assert eventually(lambda: not threads())

    revoke(task, "waits", terminated=False)
    assert redis.exists(*keys) == 4
    revoke(task, "runs", terminated=True)
    revoke(unique, "queued", terminated=False)
    assert [key for key in keys if redis.exists(key)] == [keys[0], keys[3]]
    # The key is that which it was queued with, of whatever arguments it is now; the run's is another.
    header = Header("mine", 0, key=keys[3]).as_headers()
    revoke(task, "another", terminated=True, **header)
    assert redis.exists(keys[3])
    revoke(unique, "another", terminated=False, **header)
    assert not redis.exists(keys[3])


def test_nothing_is_done_where_nothing_is_covered(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    task = a_task(app)
    with configure(active=False):
        ended_tasks._release_when_dead(task, task.run.__only_one__, "mine", ("k",), {}, None)
    assert not [record for record in caplog.records if record.name == "only_one"]


# --- tasks that have ended without having begun ------------------------------------------------------------------


def end_without_a_run(task: Any, **request: Any) -> None:
    """As where a handler of `task_prerun` has raised."""
    found = {"id": "mine", "retries": 0, "headers": None, **request}
    task_postrun.send(sender=task, task=SimpleNamespace(app=task.app, request=SimpleNamespace(**found)))


def test_what_has_ended_without_having_begun_is_free(
    app: Celery, redis: Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "only_one")
    unique = cover("{key}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    key = f"{prefix}k"
    first = unique.delay("k")
    token: Any = redis.get(key)
    header = Header(first.id, 0, key=key, token=token.decode()).as_headers()
    end_without_a_run(a_task(app), id=first.id, **header)
    end_without_a_run(unique, id=first.id, only_one_has_begun=True, **header)
    end_without_a_run(unique, id=first.id)
    with configure(active=False):
        end_without_a_run(unique, id=first.id, **header)
    assert redis.get(key) == token
    redis.set(key, TokenFactory("task", first.id, 1, "queued").token(HOUR))  # it is the next attempt's by now
    end_without_a_run(unique, id=first.id, **header)
    assert redis.exists(key)
    redis.set(key, token)
    end_without_a_run(unique, id=first.id, **header)
    assert not redis.exists(key)
    header = Header(first.id, 0, key=key, trigger=1).as_headers()
    request = SimpleNamespace(id=first.id, retries=0, headers=None, args=("k",), kwargs={}, **header)
    task_revoked.send(sender=app.task(work, name="plain", shared=False), request=request, terminated=False)
    assert not [record for record in caplog.records if record.levelname == "ERROR" or "not be" in record.message]


def test_a_retry_that_has_ended_without_having_begun_is_free(app: Celery, redis: Redis, prefix: str) -> None:
    """Its message has no token: what stands under the key says whose it is."""
    unique = cover("{key}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    key = f"{prefix}k"
    request = {"retries": 1, **Header("mine", 1, key=key).as_headers()}
    end_without_a_run(unique, **request)
    for value in (b"somebody else", TokenFactory("task", "another", 0, "queued").token(HOUR), held_by(os.getppid())):
        redis.set(key, value)
        end_without_a_run(unique, **request)
        assert redis.get(key) == value
    redis.set(key, TokenFactory("task", "mine", 1, "queued").token(HOUR))
    end_without_a_run(unique, **request)
    assert not redis.exists(key)


def test_the_newest_that_is_revoked_is_not_waited_for(app: Celery, redis: Redis, prefix: str) -> None:
    """Nor one that has ended without having begun; one that has only a key is seen to by another."""
    newest = cover("k", when_busy=buffer_one())(app.task(work, name=f"task-{uuid4()}", shared=False))
    first = newest.delay("k")
    assert newest.delay("k") == first

    def header() -> Any:
        found: Any = redis.lindex(f"{prefix}queue", 0)
        return {"only_one": json.loads(found)["headers"]["only_one"]}

    end_without_a_run(newest, id=first.id, **header())
    second = newest.delay("k")
    assert second != first
    request = SimpleNamespace(id=second.id, retries=0, headers=None, args=("k",), kwargs={}, **header())
    task_revoked.send(sender=newest, request=request, terminated=False)
    assert eventually(lambda: newest.delay("k") != second)


@pytest.mark.parametrize("how", ["the server is down", "a key cannot be made", "it has not begun"])
def test_an_error_in_a_signal_is_a_warning_with_its_traceback_once(
    app: Celery,
    redis_url: str,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """It is no error of the worker, which goes on."""
    moments = itertools.count(now(), 6.0)  # so a server that is down is asked twice
    monkeypatch.setattr(ended_tasks, "now", lambda: next(moments))
    task = a_task(app) if how == "the server is down" else a_task(app, key=lambda key: key.missing)
    unique = cover("{key}")(app.task(work, name=f"task-{uuid4()}", shared=False))
    with Proxy(redis_url) as proxy, configure(redis=proxy.url), proxy.refused():
        for _ in range(2):
            if how == "it has not begun":
                end_without_a_run(unique, retries=1, **Header("mine", 1, key=f"{prefix}k").as_headers())
            else:
                task_failure.send(sender=task, task_id="mine", exception=WorkerLostError(), args=("k",), kwargs={})
                assert eventually(lambda: not threads())
    (warning,) = caplog.records
    assert (warning.name, warning.levelname) == ("only_one", "WARNING")
    assert "could not be released" in warning.message
    assert warning.exc_info
