"""What a worker does for runs that were killed, and for tasks that have not begun: by its signals, without a worker.

The former is done by the renewing thread, and the pool forks new children meanwhile.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, Task
from celery.app.task import Context
from celery.exceptions import Retry, SoftTimeLimitExceeded, WorkerLostError
from celery.signals import task_failure, task_postrun, task_retry, task_revoked
from redis import Redis
from redis.exceptions import MovedError

from only_one import buffer_one, carry_on, configure, events, settings
from only_one.celery import ended_tasks
from only_one.celery.delivery import DeliveryState
from only_one.celery.requeue import Header
from only_one.connections.server import Server, find_server
from only_one.holder import Work
from only_one.lock import renewal
from only_one.lock.token import TokenFactory, process_start
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.celery.deliveries import HOUR, Calls, Keys, Queue, a_task, decorated, done, token_of, unique
from tests.clients import clients
from tests.interruptions import AtPlace, handled, raises, traced
from tests.lock.test_leases import RELEASES
from tests.wrapped_task import Wrapped

PATIENCE = 10.0
"""Seconds for which the death of a process is waited for."""


# Keys of runs that were killed


@pytest.fixture
def app(new_app: Callable[[], Celery]) -> Celery:
    """An app whose tasks are not lazy; and no warning was logged before."""
    events._warned_of.clear()
    app = new_app()
    app.finalize()
    return app


def work(key: str) -> str:
    return key


@pytest.fixture
def task(app: Celery) -> Any:
    """A task whose function is decorated."""
    return a_task(app, work, key="{key}")


@pytest.fixture
def unique_task(app: Celery) -> Any:
    return unique(app, "{key}", function=work)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed, and is not waited for."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def held_by(pid: int, task_id: str = "mine", **changes: Any) -> bytes:
    """The value of a run in a process."""
    value = json.loads(TokenFactory("task", task_id, 0).token(HOUR))
    value.update(pid=pid, process_start=process_start(pid), process="another", **changes)
    return json.dumps(value, separators=(",", ":")).encode()


def queued(task_id: str, attempt: int) -> bytes:
    return TokenFactory("task", task_id, attempt, "queued").token(HOUR)


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process, and leave it to its parent to wait for it."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def dead() -> bytes:
    """The value of a run in a process that is dead."""
    return token_of("mine", is_dead=True)


@pytest.mark.usefixtures("app")
def test_the_death_of_a_process_is_waited_for(
    server: Server, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For ten seconds, and not all the time; if the key's slot has moved, it is asked for again without a warning."""
    moment = 0.0
    monkeypatch.setattr(ended_tasks, "now", lambda: moment)
    delivery, options = SimpleNamespace(work=Work("mine", 0, 0), name="work"), SimpleNamespace(takeover=True)
    ending = ended_tasks._KilledRun(server, "k", delivery, options)  # type: ignore[arg-type]
    assert not ending.note_reply(ending.command(), MovedError("5 127.0.0.1:7"))
    assert not events._warned_of
    for moment, is_over in ((0.0, False), (PATIENCE - 1, False), (PATIENCE, True)):
        assert ending.note_reply(ending.command(), held_by(child.pid)) == is_over
        assert ending.try_at == moment + 0.02


def endings() -> list[Any]:
    """What the renewing thread still has to see to for runs that were killed."""
    return [each for each in renewal._renewer.pending_releases.values() if isinstance(each, ended_tasks._KilledRun)]


def fail(task: Any, key: str, error: Exception | None = None, task_id: Any = "mine") -> None:
    """Say that the process of a task is lost, as Celery does."""
    lost = error or WorkerLostError()
    task_failure.send(sender=task, task_id=task_id, exception=lost, args=(key,), kwargs={})


def revoke(task: Any, key: str, *, terminated: bool = False, **request: Any) -> None:
    about = Context({"id": "mine", "retries": 0, "args": (key,), **request})
    task_revoked.send(sender=task, request=about, terminated=terminated)
    assert eventually(lambda: not endings())


def end_without_a_run(task: Any, **request: Any) -> None:
    """As where a handler of `task_prerun` has raised."""
    about = SimpleNamespace(app=task.app, request=Context({"id": "mine", "retries": 0, **request}))
    task_postrun.send(sender=task, task=about)
    assert eventually(lambda: not renewal._renewer.pending_releases)


KILLED: dict[str, tuple[Callable[[int], bytes], bool]] = {
    "it was waited for": (held_by, True),
    "it was not waited for": (held_by, True),
    "it was not waited for, on macOS": (held_by, False),
    "it lives": (lambda _: held_by(os.getppid()), False),
    "it is on another machine": (lambda pid: held_by(pid, machine="elsewhere"), False),
    "it has begun another task": (lambda pid: held_by(pid, "another"), False),
    "it has left others, without `takeover`": (held_by, False),
    "its attempt was queued again, without `takeover`": (lambda _: queued("mine", 1), True),
    "it had published a retry": (lambda _: queued("mine", 2), False),
}
"""The process of a killed run, which was attempt 1: how the value at the key is made of its pid; is the key free?"""


@pytest.mark.parametrize("process", KILLED)
def test_the_key_of_a_killed_run_is_released_once_its_process_is_dead(
    app: Celery, keys: Keys, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, process: str
) -> None:
    make, is_free = KILLED[process]
    monkeypatch.setattr(ended_tasks, "_PATIENCE", 0.1)
    keys["k"] = make(child.pid)
    end(child)
    if process == "it was waited for":
        child.wait()
    if "macOS" in process:
        monkeypatch.delattr(os, "waitid")
    revoke(a_task(app, work, key="{key}", takeover="takeover" not in process), "k", terminated=True, retries=1)
    renewal.finish_pending_releases()
    assert ("k" not in keys) == is_free


def test_the_key_of_a_lost_process_is_released(
    task: Any, unique_task: Any, keys: Keys, child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Not that of any other failure; and nothing is done where the locking is switched off."""
    for key in ("k", "error", "unique", "limit"):
        keys[key] = held_by(child.pid, attempt=1)
    keys["uuid"] = held_by(child.pid, str(task_id := uuid4()))
    fail(task, "k")
    fail(task, "uuid", task_id=task_id)
    fail(unique_task, "unique")  # of which the worker knows no request any more
    for attempt in (1, 0):  # at a hard time limit Celery tells it twice, once of the attempt that the worker remembers
        about = Context(id="mine", retries=attempt, args=("limit",))
        task_revoked.send(sender=task, request=about, terminated=True)
    end(child)
    assert eventually(lambda: not any(key in keys for key in ("k", "uuid", "unique", "limit")))
    fail(task, "error", ValueError())
    with configure(active=False):
        fail(task, "error")
    assert eventually(lambda: not endings())
    assert "error" in keys
    assert not caplog.records


@pytest.mark.parametrize("name", ["celery.map", "celery.starmap"])
def test_the_key_of_an_item_of_a_list_of_calls_is_released(app: Celery, task: Any, keys: Keys, name: str) -> None:
    keys["k"], keys["another"] = (held_by(2**30, each, queue="celery.map") for each in ("mine", "another"))
    for named in (task.name, "a task that this worker does not know"):
        kwargs = {"task": {"task": named}, "it": ["k"]}
        task_failure.send(sender=app.tasks[name], task_id="mine", exception=WorkerLostError(), args=(), kwargs=kwargs)
        assert eventually(lambda: "k" not in keys)
    assert "another" in keys


@wraps(work)
def wrapped(key: str) -> str:
    return work(key)


def renames(self: Any, key: str) -> Any:
    return self.run(f"{key}-changed")


RUNS: dict[str, tuple[Callable[[Celery], Any], str]] = {
    "plain": (lambda app: a_task(app, work, key="{key}"), "k"),
    "bound": (lambda app: a_task(app, renames, key="{key}", celery={"bind": True}), "k"),
    "wrapped": (lambda app: a_task(app, wrapped, key="{key}"), "k"),
    "retried": (lambda app: a_task(app, work, key="{key}", celery={"autoretry_for": (OSError,)}), "k"),
    "changed by its class": (lambda app: a_task(app, work, key="{key}", celery={"__call__": renames}), "k-changed"),
    "changed by the function above": (lambda app: app.register_task(Calls()), "k-changed"),
    "made of what only the run has": (lambda app: a_task(app, work, key=lambda key: key), "k-changed"),
    "changed by pydantic": (lambda app: a_task(app, work, key="{key}", celery={"pydantic": True}), "k-changed"),
}


@pytest.mark.parametrize(("make", "key"), RUNS.values(), ids=RUNS)
def test_all_keys_are_looked_at_only_where_the_user_may_have_changed_the_arguments(
    app: Celery, keys: Keys, way: Proxy, dead: bytes, monkeypatch: pytest.MonkeyPatch, make: Any, key: str
) -> None:
    """Those of others, too, whatever is stored there; and Celery has replaced ``__call__``, as a worker has it do."""
    monkeypatch.setattr(Task, "__call__", lambda self, *args, **kwargs: self.run(*args, **kwargs))
    keys[key] = dead
    for number in range(20):  # one of which comes before it, in any order
        keys.redis.rpush(f"{keys.prefix}list {number}", "of others")
    keys.redis.mset({f"{keys.prefix}{number}": "more than one reply has" for number in range(3000)})
    fail(make(app), "k")
    assert eventually(lambda: key not in keys)
    assert ("SCAN" in way.commands) == (key != "k")


def test_all_keys_of_a_cluster_are_looked_at(task: Any, dead: bytes) -> None:
    names = [f"only_one:{number}" for number in range(20)]
    with clients("cluster") as those, those.connected(decode_responses=True) as client:
        client.mset_nonatomic({"another:k": dead, **dict.fromkeys(names, dead)})
        client.rpush("only_one:list", "of others")
        task.run.__only_one__.template = lambda key: key  # of which it is not known what the run reads
        with configure(redis=client, prefix="only_one:"):
            fail(task, "k")
            assert eventually(lambda: not (client.exists(*names) or endings()))
            assert client.exists("another:k", "only_one:list") == 2


def test_the_key_of_a_lost_process_is_released_when_a_server_that_was_away_is_back(
    task: Any, keys: Keys, way: Proxy, dead: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it was away."""
    monkeypatch.setattr(ended_tasks, "_PATIENCE", 0.1)
    keys["k"] = dead
    node = find_server(way.url).node_of("k")
    with way.refused():
        fail(task, "k")
        assert eventually(lambda: caplog.records)
        for _ in range(3):  # it is asked again
            before = node.backs_off_until
            assert eventually(lambda before=before: node.backs_off_until > before)  # type: ignore[misc]
    way.lose_request(*RELEASES)
    way.lose_reply(*RELEASES)
    assert eventually(lambda: "k" not in keys)
    assert eventually(lambda: not renewal._renewer.pending_releases)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_the_pool_can_fork_while_a_server_is_frozen(task: Any, keys: Keys, way: Proxy, dead: bytes) -> None:
    """Also if the user's client would wait for ever."""
    keys["k"] = dead
    with configure(redis=Redis.from_url(way.url, socket_timeout=None)):
        fault = way.hold_up("GET")
        fail(task, "k")
        assert fault.met.wait(LIMIT)
        child = os.fork()
        if not child:
            os._exit(0 if task.run("another") == "another" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        fault.let_go()
        assert eventually(lambda: "k" not in keys)


def test_the_key_of_a_revoked_task_is_released(task: Any, unique_task: Any, keys: Keys, dead: bytes) -> None:
    """A task that waits has a key only if it is unique from queued to finished."""

    for key in ("waits", "runs"):
        keys[key] = dead
    revoke(task, "waits")
    assert "waits" in keys
    revoke(task, "", terminated=True, args=None, kwargs={"key": "runs"})
    assert "runs" not in keys
    # The key is that which it was queued with, of whatever arguments it is now; the run's is another.
    header = Header("mine", 0, key=f"{keys.prefix}changed").as_headers()
    keys["changed"] = dead
    revoke(task, "another", terminated=True, **header)
    assert "changed" in keys
    revoke(unique_task, "another", terminated=True, **header)
    assert "changed" not in keys
    # A redelivery may have been begun by a process that was killed.
    keys["changed"] = dead
    revoke(unique_task, "another", delivery_info={"redelivered": True}, **header)
    assert "changed" not in keys
    keys["changed"] = queued("mine", 0)
    revoke(unique_task, "another", **header)
    assert eventually(lambda: "changed" not in keys)


def test_the_key_of_a_task_that_has_not_begun_is_on_the_server_of_its_decorator(
    new_app: Any, keys: Keys, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "current", {})
    by_decorator = unique(new_app(broker_url="memory://"), "k", redis=redis_url)
    keys["k"] = queued("mine", 0)
    end_without_a_run(by_decorator, **Header("mine", 0, key=f"{keys.prefix}k").as_headers())
    assert "k" not in keys


@pytest.mark.parametrize(("is_unique", "has_ended"), [(False, False), (True, False), (True, True)])
def test_a_task_that_is_retried_because_its_process_is_lost_has_its_key_while_it_waits_if_it_is_unique(
    task: Any, unique_task: Any, keys: Keys, dead: bytes, *, is_unique: bool, has_ended: bool
) -> None:
    """Celery's main process publishes the retry, and says so by another signal than that of a failure."""
    lost, state = (unique_task, None if has_ended else ("queued", 2)) if is_unique else (task, None)
    keys["k"] = dead
    if has_ended:  # the retry, meanwhile
        keys.withdraw("mine", 2)
    request = Context(id="mine", retries=1, **({"args": ("k",)} if is_unique else {"kwargs": {"key": "k"}}))
    task_retry.send(sender=lost, request=request, reason=Retry(exc=ValueError(), when=60))
    assert not endings()
    task_retry.send(sender=lost, request=request, reason=Retry(exc=WorkerLostError(), when=60))
    assert eventually(lambda: keys.state() == state and not endings())
    if state:
        assert keys.lives_for(HOUR + 60)
        assert unique_task.delay("k").id == "mine"


def test_who_takes_over_the_key_of_a_task_whose_process_is_lost_owes_it_nothing(unique_task: Any, keys: Keys) -> None:
    """The retry may end without a run meanwhile, and would withdraw itself only."""
    keys["k"] = held_by(os.getppid(), "another")
    request = Context(id="mine", retries=0, args=("k",), **Header("mine", 0, key=f"{keys.prefix}k").as_headers())
    task_retry.send(sender=unique_task, request=request, reason=Retry(exc=WorkerLostError(), when=60))
    assert keys.come_to_be_withdrawn("mine")
    # Where nobody has taken it over, it is not free before the retry's value is stored.
    keys["k"] = queued("mine", 0)
    ended_tasks.withdraw(unique_task, request, is_retried=True)
    renewal.finish_pending_releases()
    assert "k" in keys


# Tasks that have ended without having begun


def test_a_task_that_has_ended_without_having_begun_has_no_key(
    unique_task: Any, keys: Keys, way: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """The value at the key says whose it is: the message of a retry has no token."""
    caplog.set_level(logging.DEBUG, "only_one")
    request = {"retries": 1, **Header("mine", 1, key=f"{keys.prefix}k", trigger=1).as_headers()}
    for value in (b"somebody else", queued("another", 1), queued("mine", 0), queued("mine", 2), held_by(os.getppid())):
        keys["k"] = value
        end_without_a_run(unique_task, **request)
        assert keys["k"] == value
    keys["k"] = value = queued("mine", 1)
    end_without_a_run(unique_task, only_one_delivery=DeliveryState(withdraws=False), **request)
    end_without_a_run(unique_task, retries=1)
    with configure(active=False):
        end_without_a_run(unique_task, **request)
    assert keys["k"] == value
    # Celery has sent it again, because its process was lost; its message, sent with an id of its own, had no key.
    without = [{"retries": 1, "args": ("k",)}, {"retries": 1, "args": (), "kwargs": {"key": "k"}}]
    ended = [(each, request) for each in (unique_task, Wrapped(unique_task))]
    for each, its in [*ended, *zip((unique_task, Wrapped(unique_task)), without, strict=True)]:
        keys["k"] = value
        way.forget_commands()
        end_without_a_run(each, **its)
        assert "k" not in keys
        assert way.commands.count("EVAL") == 1
    # The task's own `apply_async` has given it another id than its header has.
    keys["k"] = queued("mine", 0)
    end_without_a_run(unique_task, args=("k",), **Header("first", 0, key=f"{keys.prefix}k").as_headers())
    assert "k" not in keys
    assert not [record for record in caplog.records if record.levelname == "ERROR" or "not be" in record.message]


def test_a_task_that_ends_without_having_begun_is_withdrawn_though_its_soft_time_limit_comes_then(
    unique_task: Any, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever in our code; Celery drops what a handler of its signals raises, and logs it."""
    header = Header("mine", 0, key=f"{keys.prefix}k").as_headers()
    over = raises(SoftTimeLimitExceeded)
    with handled(over):
        for number in itertools.count(1):
            keys["k"] = queued("mine", 0)
            place = AtPlace(number, over)
            with traced(place):
                end_without_a_run(unique_task, **header)
            assert eventually(lambda: "k" not in keys), place.where
            if not place.where:
                break
    assert number > 50
    caplog.clear()


def test_a_message_that_was_requeued_carries_its_key_by_which_it_is_withdrawn(queue: Queue, keys: Keys) -> None:
    """One that was sent by name had none."""
    newest = unique(queue.app, "k", function=work, when_busy=buffer_one())
    queue.app.send_task(newest.name, ("k",))
    assert "only_one" not in queue.messages()[-1]["headers"]
    with keys.busy():
        queue.deliver()
    message = queue.take()
    assert message["headers"]["only_one"]["key"] == f"{keys.prefix}k"
    revoke(newest, "k", id=message["headers"]["id"], only_one=message["headers"]["only_one"])
    assert keys.come_to_be_withdrawn(message["headers"]["id"])


def test_a_task_that_ran_without_its_key_is_withdrawn_though_another_decorator_of_it_had_one(
    queue: Queue, keys: Keys, way: Proxy, redis_url: str
) -> None:
    task = decorated(a_task(queue.app, done, key="inner", redis=redis_url), key="k", when_down=carry_on)
    answer = task.delay()
    with way.cut():
        queue.deliver()
    assert answer.get() == "done"
    assert eventually(lambda: "k" not in keys)


def lose_and_retry(task: Any, **request: Any) -> None:
    """Say that the process of a task is lost, and that it is sent again, as Celery does."""
    lost = Retry(exc=WorkerLostError(), when=60)
    task_retry.send(sender=task, request=Context({"retries": 0, **request}), reason=lost)
    assert eventually(lambda: not endings())


@pytest.mark.parametrize(("finish", "waits"), [(end_without_a_run, False), (revoke, False), (lose_and_retry, True)])
def test_the_newest_task_is_not_waited_for_once_it_has_ended(queue: Queue, finish: Any, *, waits: bool) -> None:
    """But while it is retried because its process is lost."""
    newest = unique(queue.app, "k", function=work, when_busy=buffer_one())
    first = newest.delay("k")
    assert newest.delay("k") == first
    header = {"only_one": queue.take()["headers"]["only_one"]}
    finish(newest, **({"key": "k"} if finish is revoke else {"args": ("k",)}), id=first.id, **header)
    renewal.finish_pending_releases()
    assert (newest.delay("k") == first) == waits


@pytest.mark.parametrize("how", ["the server is down", "a key cannot be made"])
def test_an_error_in_a_signal_is_a_warning_with_its_traceback_once(
    queue: Queue, task: Any, keys: Keys, way: Proxy, how: str,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is no error of the worker, which goes on."""
    monkeypatch.setattr(ended_tasks, "_PATIENCE", 0.2)
    monkeypatch.setattr(ended_tasks, "_WAITS_FOR_A_SERVER", 0.5)  # in which it is asked a few times
    without_key = a_task(queue.app, work, key="{key.missing}")
    with way.refused():
        for _ in range(2):
            fail(task if how == "the server is down" else without_key, "k")
            assert eventually(lambda: not endings())
    (warning,) = caplog.records
    assert (warning.name, warning.levelname, warning.message[:14]) == ("only_one", "WARNING", "a key of task-")
    assert "could not be released" in warning.message
    assert warning.exc_info
    assert (warning.threadName == "only_one-log") == (how == "the server is down"), "the renewing thread logs nothing"
    if how == "the server is down":
        keys.redis.rpush(f"{keys.prefix}k", "no string")
        fail(task, "k")
        assert eventually(lambda: len(caplog.records) == 2), "one of another kind is told, too"
        assert eventually(lambda: not endings())
