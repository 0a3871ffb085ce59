"""The renewing thread: what it does when, by a clock that stands still; the test itself takes each step."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
import redis as redis_py
from redis.exceptions import NoPermissionError, ResponseError

from only_one.clock import now
from only_one.events import log
from only_one.lock import renewal
from only_one.lock.lease import Lease
from rigs.waiting import LIMIT, eventually
from tests.lock.test_leases import no_more_threads
from tests.lock.watched import DOWN, LONG, SOON, TTL, Watch, keys, node
from tests.renewal import MOMENT

# Leases that are due


def test_which_leases_are_renewed_and_which_not_yet(watch: Watch, redis_url: str) -> None:
    """One that is due within a fiftieth of its time goes with the others; a moment later, or without renewal, not.

    A server's clock that was set back lengthens no life that is renewed: else the key would outlive a holder that is
    killed later.
    """
    server = watch.server(redis_url)
    due, late, plain = watch.lease(server, "due"), watch.lease(server, "late"), watch.lease(server, "plain", TTL)
    due.renew_at = MOMENT + SOON
    late.renew_at = math.nextafter(MOMENT + SOON, math.inf)
    plain.renew_at = MOMENT
    assert watch.renewer.renew_due() is False
    assert keys(node(server).trips) == [["due"]]
    assert (due.expires_at, due.renew_at) == (MOMENT + TTL, MOMENT + TTL / 3)
    assert late.renew_at > MOMENT + SOON
    assert 0 < watch.redis.pttl(due.key) <= TTL * 1000 < watch.redis.pttl(late.key)


@pytest.mark.parametrize(
    ("limit", "expires_in", "reason"), [(TTL, TTL, "overrun"), (LONG, TTL, "expired"), (TTL, LONG, "overrun")]
)
def test_a_lease_that_is_lost_by_the_clock(
    watch: Watch, redis_url: str, limit: float, expires_in: float, reason: str
) -> None:
    """Its end may come before its expiry, as that of a task that is to begin later."""
    server = watch.server(redis_url)
    told: list[tuple[str, str]] = []
    lock = watch.lease(server, limit=limit)
    lock.expires_at = MOMENT + expires_in
    lock.on_loss.append(lambda lost: told.append((lost.reason, threading.current_thread().name)))
    watch.clock.moment += TTL
    lock.renew_at = MOMENT
    assert watch.renewer.renew_due() is False
    assert (lock.reason, lock.value, node(server).trips) == (reason, b"", [])
    assert eventually(lambda: told == [(reason, "only_one-lost")])
    assert watch.renewer.held() == []
    lock.on_loss.append(print)
    watch.renewer.note_loss(lock, b"another's")  # the reason that was noted first counts
    assert lock.on_loss


def test_the_last_renewal_lasts_until_the_end(watch: Watch, redis_url: str) -> None:
    lock = watch.lease(watch.server(redis_url), limit=2 * TTL)
    for moment, expires_at, renew_at in [
        (MOMENT + TTL - 1, MOMENT + 2 * TTL - 1, MOMENT + TTL - 1 + TTL / 3),
        (MOMENT + TTL, MOMENT + 2 * TTL, MOMENT + 2 * TTL),
        (MOMENT + 1.5 * TTL, MOMENT + 2 * TTL, MOMENT + 2 * TTL),
        (MOMENT + 2 * TTL - 0.5, MOMENT + 2 * TTL, MOMENT + 2 * TTL),
    ]:
        watch.clock.moment = lock.renew_at = moment
        lock.expires_at = moment + 0.25
        watch.redis.persist(lock.key)
        watch.renewer.renew_due()
        assert (lock.expires_at, lock.renew_at) == (expires_at, renew_at)
        assert (expires_at - moment - LIMIT) * 1000 < watch.redis.pttl(lock.key) <= (expires_at - moment) * 1000


def test_a_trip_that_takes_long_gives_others_the_next_turn(watch: Watch, redis_url: str) -> None:
    """Renewals, and releases in the background, of which each server has one."""
    for takes, trips in [(0.0, [1, 1]), (0.1, [1, 1]), (0.125, [1, 0])]:
        servers = [watch.server(redis_url) for _ in range(4)]
        for server in servers[:2]:
            watch.lease(server, str(server)).renew_at = watch.clock.moment
        for server in servers[2:]:
            server.features.release = "EVAL"  # which all servers know
            watch.pending(server, str(server)).try_at = watch.clock.moment
        for server in servers[::2]:
            node(server).takes = takes
        assert watch.renewer.renew_due() is (0 in trips)
        watch.renewer.pending_releases.release_due()
        assert [len(node(server).trips) for server in servers] == trips * 2
        while watch.renewer.renew_due():
            pass
        watch.renewer.pending_releases.release_due()
        assert [len(node(server).trips) for server in servers] == [1] * 4


# Renewals that fail


def test_a_renewal_that_fails_is_tried_again_after_a_tenth_of_the_lease(watch: Watch) -> None:
    """A second at the most, and not when it has expired; the node backs off for as long as the shortest of them."""
    server = watch.server(DOWN)
    locks = [watch.lease(server, str(ttl), ttl=ttl) for ttl in (8.0, 2.0, 32.0)]
    brief = watch.lease(server, "brief")
    brief.expires_at = MOMENT + 0.03125
    for _ in range(2):
        for lock in (*locks, brief):
            lock.renew_at = MOMENT
        watch.renewer.renew_due()
        assert [lock.renew_at - MOMENT for lock in locks] == pytest.approx([0.8, 0.2, 1.0])
        assert brief.renew_at == brief.expires_at
        assert node(server).backs_off_until == pytest.approx(MOMENT + 0.2)
        node(server).backs_off_until = MOMENT


def test_why_a_renewal_failed(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once until the reason is another, by a thread that may take its time."""
    logged: list[tuple[int, str]] = []
    monkeypatch.setattr(renewal, "log_beside", lambda level, text, *rest: logged.append((level, text % rest)))
    server = watch.server(DOWN)
    lock = watch.lease(server)

    def renew(reply: Any = None) -> None:
        lock.renew_at = node(server).backs_off_until = MOMENT
        if reply:
            server._nodes.send = lambda *_: [reply]
        watch.renewer.renew_due()

    renew()
    down = lock.trouble
    assert isinstance(down, redis_py.ConnectionError)
    renew()
    # redis-py's `repr` does not tell the last two apart.
    for refusal in (NoPermissionError("no permissions"), ResponseError("busy"), ResponseError("full")):
        renew(refusal)
    refused = "cannot be renewed, and will be lost, as the server refuses a command to its user: no permissions"
    advice = "give it what docs/access-rights.md lists, or write timeout= and no lease="
    again = "could not be renewed, and will be tried again"
    assert logged == [
        (logging.DEBUG, f"{lock.key} {again}: ConnectionError: {down}"),
        (logging.WARNING, f"{lock.key} {refused}: {advice}"),
        (logging.DEBUG, f"{lock.key} {again}: ResponseError: busy"),
        (logging.DEBUG, f"{lock.key} {again}: ResponseError: full"),
    ]


def test_the_log_is_written_by_another_thread_if_somebody_reads_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = Mock()
    monkeypatch.setattr(renewal, "start_native_thread", started)
    for level in (logging.INFO, logging.DEBUG):
        caplog.set_level(level, "only_one")
        renewal.log_beside(logging.DEBUG, "%s", "text", exc_info=True)
    ((name, run, *rest),) = [each.args for each in started.call_args_list]
    assert (name, run.func, run.keywords) == ("only_one-log", log, {"exc_info": True})
    assert rest == [logging.DEBUG, "%s", "text"]


def test_a_node_that_backs_off_is_not_asked(watch: Watch, redis_url: str) -> None:
    server = watch.server(redis_url)
    lock, brief = watch.lease(server, "lock"), watch.lease(server, "brief")
    node(server).backs_off_until = MOMENT + 2
    brief.expires_at = MOMENT + 1
    lock.renew_at = brief.renew_at = MOMENT
    watch.renewer.renew_due()
    assert (lock.renew_at, brief.renew_at, node(server).trips) == (MOMENT + 2, MOMENT + 1, [])
    watch.clock.moment += 2
    brief.expires_at = MOMENT + 3
    watch.renewer.renew_due()
    assert keys(node(server).trips) == [["lock", "brief"]]


def test_a_server_that_cannot_be_looked_at_is_in_a_minute(watch: Watch) -> None:
    server = watch.server(DOWN)
    watch.renewer.not_looked_at[server] = "k"
    assert watch.renewer.next_due() == -math.inf
    watch.renewer.look_at_a_new_server()
    assert server.looked_at_from == MOMENT + 60
    assert node(server).backs_off_until == pytest.approx(MOMENT + 0.05)
    assert watch.renewer.not_looked_at == {}
    assert watch.renewer.next_due() == math.inf


# The sleep


def test_only_runs_that_are_under_way_are_in_its_care(watch: Watch, redis_url: str) -> None:
    """Runs that have ended, or are gone, leave nothing."""
    server = watch.server(redis_url)
    lost, kept = watch.lease(server, "lost"), watch.lease(server, "kept")
    lost.lose("deleted")
    server.looked_at_from = math.inf
    gone = Lease(server, "gone", b"gone", MOMENT, TTL, LONG)
    renewal.hold(gone)
    assert watch.renewer.held() == [kept, gone]
    assert gone.renewer is watch.renewer
    for _ in range(2):  # as a forked child does, which has none
        renewal.let_go(gone)
        assert b"gone" not in watch.renewer.leases
    renewal.hold(gone)
    del gone
    assert watch.renewer.held() == [kept]
    assert sorted(watch.renewer.leases) == [b"kept", b"lost"]
    assert watch.renewer.next_due() == kept.renew_at
    pending = watch.pending(server)
    assert watch.renewer.next_due() == pending.try_at < kept.renew_at
    pending.try_at = kept.renew_at + 1
    assert watch.renewer.next_due() == kept.renew_at


@pytest.fixture
def idle() -> Any:
    """A renewer that sleeps when the test says so, by the real clock."""
    renewer = renewal._Renewer()
    renewer.vacancy.clear()
    return renewer


@pytest.mark.timeout(LIMIT)
def test_it_sleeps_until_something_is_due(idle: Any) -> None:
    due = now() + 0.05
    idle.pending_releases[b"k"] = SimpleNamespace(try_at=due)
    idle.woken.put(due + 1)
    idle.sleep()
    assert now() >= due == idle.wakes_at


def test_a_new_lease_wakes_the_thread_only_if_something_is_due_sooner(watch: Watch, redis_url: str) -> None:
    """As for a server that it has not looked at yet, and no more often: to be woken costs a run more than all else."""
    server, renewer = watch.server(redis_url), watch.renewer
    lease = watch.lease(server)
    renewer.wakes_at = lease.renew_at
    server.looked_at_from = math.nextafter(MOMENT, math.inf)
    renewal.hold(lease)
    assert (renewer.not_looked_at, renewer.woken.empty()) == ({}, True)
    server.looked_at_from = MOMENT
    renewal.hold(lease)
    assert (renewer.not_looked_at, server.looked_at_from) == ({server: lease.key}, math.inf)
    assert renewer.woken.get_nowait() == lease.asked_at
    renewer.not_looked_at.clear()
    renewal.hold(lease)
    assert (renewer.not_looked_at, renewer.woken.empty()) == ({}, True)


@pytest.mark.timeout(LIMIT)
def test_it_sleeps_for_some_microseconds(idle: Any) -> None:
    """After something has come while it was awake, CPython's queue may wait for ever where a time-out is so short."""
    for number in range(10_000):  # of which one in some 1,500 did not end
        idle.woken.put(0.0)
        idle.woken.get()
        idle.next_due = partial(float, now() + number % 40 * 1e-7)
        idle.sleep()


@pytest.mark.timeout(LIMIT)
def test_a_pending_release_that_comes_when_it_is_about_to_sleep(idle: Any) -> None:
    """It does not know yet that it is to be woken for it."""
    looks, due = idle.next_due, now()

    def next_due() -> float:
        before: float = looks()
        if not idle.pending_releases:
            idle.pending_releases[b"k"] = SimpleNamespace(try_at=due)
            idle.wake_by(due)
        return before

    idle.next_due = next_due
    idle.sleep()
    assert idle.woken.empty()
    assert idle.wakes_at == due


# The thread


@pytest.mark.parametrize("fails", range(4))
def test_a_step_that_fails_is_logged_and_the_next_waits_a_moment(
    watch: Watch, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    taken = Mock()
    steps = ("renew_due", "pending_releases.release_due", "look_at_a_new_server", "sleep")
    for number, name in enumerate(steps):
        step = Mock(return_value=False, side_effect=ZeroDivisionError if number == fails else None)
        taken.attach_mock(step, f"step_{number}")
        monkeypatch.setattr(f"only_one.lock.renewal._renewer.{name}", step)
    monkeypatch.setattr(renewal, "time", taken.time)
    monkeypatch.setattr(renewal, "log_beside", taken.log)
    taken.log.side_effect = MemoryError
    watch.renewer.take_turn()
    in_turn = [f"step_{number}" for number in range(4)]
    in_turn[fails + 1 : fails + 1] = ["log", "time.sleep"]
    assert [name for name, _, _ in taken.mock_calls] == in_turn
    taken.time.sleep.assert_called_once_with(0.1)
    level, text, trace = taken.log.call_args.args
    assert (level, text) == (logging.ERROR, "the thread that renews goes on after:\n%s")
    assert "ZeroDivisionError" in trace
    taken.reset_mock()
    getattr(taken, f"step_{fails}").configure_mock(return_value=True, side_effect=None)
    watch.renewer.take_turn()  # this step has left something, which waits until leases have had another turn
    assert [name for name, _, _ in taken.mock_calls] == in_turn[: fails + 1]


def test_the_thread_ends_when_it_is_told_to() -> None:
    """As at the exit of a process of gevent's: the thread's hub is gone before the interpreter is."""
    renewer = renewal._Renewer()
    before = set(threading.enumerate())
    assert renewer.start_thread() is None
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    assert eventually(lambda: not renewer.vacancy)
    second = threading.Thread(target=renewer.run, daemon=True)  # started at the same time, it finds that one runs
    second.start()
    second.join(LIMIT)
    assert [thread.is_alive(), second.is_alive()] == [True, False]
    renewer.end()
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert renewer.start_thread() is None  # another, for a lease that comes later
    assert eventually(lambda: not renewer.vacancy)
    renewer.end()
    assert renewer.vacancy
    renewer.vacancy, renewer.ended = {}, (ended := Mock(**{"get.side_effect": Empty}))  # as a thread that is stuck
    renewer.end()
    ended.get.assert_called_once_with(timeout=1)


GREEN: dict[str, Callable[[Any], Any]] = {
    "gevent.monkey": lambda start: SimpleNamespace(
        is_module_patched="threading".__eq__,
        get_original=lambda *name: name == ("_thread", "start_new_thread") and start,
    ),
    "eventlet.patcher": lambda start: SimpleNamespace(
        is_monkey_patched="thread".__eq__, original=lambda name: name == "_thread" and Mock(start_new_thread=start)
    ),
}


@pytest.mark.parametrize("name", GREEN)
def test_under_green_threads_it_is_one_of_the_system_that_ends_before_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    renewer, started = renewal._Renewer(), Mock()
    monkeypatch.setitem(sys.modules, name, GREEN[name](started.thread))
    monkeypatch.setattr(renewal, "atexit", started.atexit)
    assert renewer.start_thread() is None
    assert started.mock_calls == [call.atexit.register(renewer.end), call.thread(renewer.run, ())]


def test_where_no_thread_can_be_started(caplog: pytest.LogCaptureFixture) -> None:
    """It is told, and started as soon as one can be."""
    renewer = renewal._Renewer()
    with no_more_threads():
        renewer.wake_by(MOMENT)
    assert [record.getMessage() for record in caplog.records] == [
        "no thread can be started: until one can, no key is renewed, nor released later"
    ]
    caplog.clear()
    name: Future[str] = Future()
    renewer.run = lambda: name.set_result(threading.current_thread().name)  # type: ignore[method-assign]
    renewer.wake_by(MOMENT)
    assert name.result(LIMIT) == "only_one-leases"
    assert caplog.records == []


FIRST_CALL = """
import sys
from only_one import current_lock, only_one
from tests.renewal import is_idle, is_renewed
before = {*sys.modules}
assert only_one(lambda: is_renewed(current_lock()), key="k", lease=60)() and is_idle()
print(*({*sys.modules} - before))
"""


@pytest.mark.sees_mutmut
def test_what_a_first_call_needs_is_imported_before(redis_url: str) -> None:
    """Forked while this thread, or that which renews, imports it, a child would wait for it for ever."""
    environment = {**os.environ, "ONLY_ONE_REDIS_URL": redis_url.replace("127.0.0.1", "localhost")}
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == "\n"
