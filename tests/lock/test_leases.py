"""Keys that are renewed while a run lives, are lost when they are lost, and are never left behind.

What a run holds is watched from outside, by another client.
Faults are real: servers are stopped and cut off while a run holds its key.
Leases are long, and renewed when the test says so; that they are kept in time under load is `live.test_ten_leases`.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import redis

from only_one import LockLost, LockUnavailable, only_one
from only_one.clock import now
from only_one.lock import renewal
from rigs.proxy import Fault, Proxy
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, as_async, both, decorated, patient
from tests.faults.programs import Program, Running
from tests.renewal import is_awaited, is_renewed, later, renew_now

LONG = 3600.0
"""Seconds that no test takes, so that no key expires by itself."""

RELEASES = ("DELIFEQ", "DELEX", "EVAL")


# Runs that are longer than their lease


def test_runs_are_renewed_again_and_again(direct: Any, kind: type[Running]) -> None:
    """In threads and in event loops, each for a whole lease, and when a third of it has gone by."""
    week = 7 * 24 * LONG
    with kind(lease=week) as run:
        lock = run.lock
        assert lock.renew_at - lock.asked_at == pytest.approx(week / 3)
        assert is_awaited(lock)
        token = direct.get(lock.key)
        for _ in range(3):
            direct.pexpire(lock.key, 30_000)
            assert is_renewed(lock)
            assert (week - LIMIT) * 1000 < direct.pttl(lock.key) <= week * 1000
            assert lock.expires_at - lock.renew_at == pytest.approx(week * 2 / 3)
            assert is_awaited(lock)
        assert direct.get(lock.key) == token == lock.token
    assert direct.exists(lock.key) == 0
    assert run.told == []


def test_scripts_that_are_flushed_during_a_run(direct: Any, key: str) -> None:
    with Running(lease=LONG) as run:
        direct.script_flush()
        assert is_renewed(run.lock)
        direct.script_flush()
    assert direct.exists(key) == 0
    assert run.told == []


# The thread


@contextmanager
def no_more_threads() -> Iterator[None]:
    """The system starts no thread, as where a limit is reached: there is no room for a stack of 64 TB."""
    threading.stack_size(2**46)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=print).start()
        yield
    finally:
        threading.stack_size(0)


def test_a_loss_that_no_thread_can_be_started_for(direct: Any, kind: type[Running]) -> None:
    """The run tells of it at its end, and others are renewed as before."""
    with kind(lease=LONG) as run, Running("other", lease=LONG) as other:
        assert is_renewed(other.lock)
        assert is_awaited(other.lock)
        with no_more_threads():
            direct.delete(run.lock.key)
            renew_now(run.lock)
            assert eventually(lambda: not run.lock.is_held)
            assert is_renewed(other.lock)
            assert run.told == []
            run.__exit__()
        assert is_renewed(other.lock)
    assert (run.told, other.told) == (["deleted"], [])


@pytest.mark.parametrize("times", [{}, {"lease": 60}, {"timeout": 600, "lease": 60}, {"timeout": 600}])
def test_a_call_whose_key_no_thread_could_renew_says_so(
    direct: Any, key: str, monkeypatch: pytest.MonkeyPatch, kind: type[Running], times: dict[str, Any]
) -> None:
    """Before it asks for its key; a call without a lease needs no thread."""
    monkeypatch.setattr(renewal, "_renewer", renewal._Renewer())
    run = kind(**times)
    run.finish.set()
    call = run._call
    with no_more_threads():
        if "lease" not in times and times:
            assert call() == "done"
            return
        with pytest.raises(LockUnavailable, match=r"can't start new thread.*: write timeout= without lease="):
            call()
    assert renewal._renewer.pending_releases == {}
    assert not direct.exists(key)
    assert call() == "done"


FIRST_CALL = """
import sys, threading
from only_one import configure, current_lock, only_one

configure(redis=sys.argv[1], prefix=sys.argv[2])

@only_one("k", lease=60, when_down=str)
def work():
    from tests.renewal import is_renewed
    return "renewed" if is_renewed(current_lock()) else "not renewed"

def say():
    print(work(), flush=True)
"""

AFTER_MAIN = f"""{FIRST_CALL}
threading.Thread(target=lambda: (threading.main_thread().join(), say())).start()
"""

IN_A_SUBINTERPRETER = f"""
import sys

code = f"import sys; sys.argv, sys.path[:] = {{sys.argv!r}}, {{sys.path!r}}" + '''{FIRST_CALL}''' + "say()"
if sys.version_info < (3, 13):
    import _xxsubinterpreters
    _xxsubinterpreters.run_string(_xxsubinterpreters.create(isolated=True), code)
else:
    import _interpreters
    _interpreters.exec(_interpreters.create("isolated"), code)
"""


@pytest.mark.parametrize("source", [AFTER_MAIN, IN_A_SUBINTERPRETER])
def test_a_first_call_after_the_main_thread_has_ended_is_renewed_or_says_so(
    redis_url: str, prefix: str, source: str
) -> None:
    """From Python 3.12 on no thread can be started by then, and in an isolated sub-interpreter none ever."""
    with Program(source, redis_url, prefix) as program:
        said = program.line()
    assert said == "renewed" or "(nothing could renew the key: write timeout= without lease=" in said


# Keys that are deleted or acquired by others


@pytest.mark.parametrize("value", [None, b"by hand", b"\xff\x00", b"", {b"a": b"1"}], ids=repr)
def test_keys_that_are_taken_away_during_a_run(direct: Any, key: str, kind: type[Running], value: Any) -> None:
    """Deleted, overwritten, or of another type: the run is told, and leaves alone what is stored by then."""
    reason = "deleted" if value is None else "taken"
    with kind(lease=LONG) as run, Running("another", lease=LONG) as another:
        direct.delete(key)
        if isinstance(value, dict):
            direct.hset(key, mapping=value)
        elif value is not None:
            direct.set(key, value)
        renew_now(run.lock)
        assert eventually(lambda: not run.lock.is_held)
        with pytest.raises(LockLost, match=reason) as lost:
            run.lock.ensure_held()
        assert lost.value.value == (value.decode(errors="backslashreplace") if isinstance(value, bytes) else "")
        if value is None:  # What is lost is lost, whatever becomes of the key.
            direct.set(key, run.lock.token, px=30_000)
        renew_now(run.lock)
        assert is_renewed(another.lock)
        assert direct.pttl(key) <= 30_000
    assert (direct.hgetall if isinstance(value, dict) else direct.get)(key) == value
    assert direct.pttl(key) == (-2 if value is None else -1)
    assert eventually(lambda: run.told)  # by a thread, for which the run does not wait
    assert run.told == [reason]


# Acquires that are not confirmed, and releases that fail


def freed(client: Any, key: str) -> bool:
    """Whether a key is free soon, long before it would expire by itself."""
    return eventually(lambda: not client.exists(key))


def sets(client: Any) -> int:
    """How many SET commands the server has carried out."""
    calls: int = client.info("commandstats").get("cmdstat_set", {"calls": 0})["calls"]
    return calls


def leaves_no_key(held_up: Fault, client: Any, key: str) -> bool:
    """Whether a key is free soon after a SET that was held up is carried out."""
    before = sets(client)
    held_up.let_go()
    return eventually(lambda: sets(client) > before) and freed(client, key)


def work() -> str:
    return "done"


def succeeds(call: Callable[[], Any]) -> bool:
    """Whether a call runs; with short time-outs it may not."""
    with suppress(LockUnavailable):
        return bool(call() == "done")
    return False


@pytest.mark.soak
def test_a_server_that_is_frozen_during_an_acquire(server: RedisServer, key: str) -> None:
    """Sync, because an event loop of its own connects anew for each call, and so sends no SET to a frozen server."""
    late = 0
    with redis.Redis.from_url(server.url) as client:
        call = decorated(work, lease=LONG, redis=patient(server.url, 0.1))
        for _ in range(50):
            assert eventually(lambda: succeeds(call))
            before = sets(client)
            server.pause()
            try:
                with pytest.raises(LockUnavailable):
                    call()
                threading.Event().wait(random.uniform(0, 0.2))
            finally:
                server.resume()
            late += eventually(lambda before=before: sets(client) > before, 1)  # type: ignore[misc]
            assert freed(client, key)
    print(late, "acquires were carried out late")
    assert late > 25  # it did carry out what it was sent before it was frozen


@both
@pytest.mark.parametrize("is_frozen", [False, True], ids=["by itself", "by a frozen server"])
def test_a_command_that_arrives_long_after_its_caller_has_given_up(
    proxy: Proxy, direct: Any, key: str, decorate: Decorate, *, is_frozen: bool
) -> None:
    """The proxy is a server that is frozen for longer than the lease: of all that was sent the SET comes last."""
    call = decorate(work, lease=LONG, redis=proxy.url)
    assert eventually(lambda: succeeds(call))
    held = proxy.hold_up("SET", times=2)
    frozen = proxy.lose_request(*RELEASES, times=sys.maxsize if is_frozen else 0, then="hang")
    with pytest.raises(LockUnavailable):
        call()
    proxy.forget_commands()
    with later(LONG if is_frozen else 0):  # and it is asked for in vain
        left = renewal._renewer.pending_releases
        assert eventually(lambda: len(proxy.commands) >= 3)  # "missing" is not final
        assert not is_frozen or eventually(lambda: all(each.try_at > now() + LONG for each in list(left.values())))
    frozen.left = 0
    assert leaves_no_key(held, direct, key)
    assert eventually(lambda: succeeds(call))


@both
def test_an_answer_that_comes_when_the_key_has_expired_again(
    proxy: Proxy, direct: Any, key: str, decorate: Decorate
) -> None:
    with ThreadPoolExecutor(1) as pool:
        call = decorate(work, lease=LONG, redis=patient(proxy.url))
        assert call() == "done"
        held = proxy.hold_up("SET")
        called = pool.submit(call)
        assert held.met.wait(LIMIT)
        with later(LONG):
            held.let_go()
            with pytest.raises(LockUnavailable, match=r": the answer came when the key had expired again$"):
                called.result(LIMIT)
        assert freed(direct, key)


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task; again where Python before 3.12 loses it, as redis-py has just sent something."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.1)


@pytest.mark.parametrize("arrives", ["at all", "late", "never", "release never"])
def test_an_acquire_that_is_cancelled(proxy: Proxy, direct: Any, key: str, arrives: str) -> None:
    """Or a release."""
    faults: dict[str, Callable[[], Fault]] = {
        "at all": partial(proxy.lose_reply, "SET", then="hang"),
        "late": partial(proxy.hold_up, "SET"),
        "never": partial(proxy.lose_request, "SET", then="hang"),
        "release never": partial(proxy.lose_request, *RELEASES, then="hang"),
    }

    async def main() -> None:
        run = only_one(as_async(work), key="k", lease=LONG, redis=patient(proxy.url))
        assert await run() == "done"
        fault = faults[arrives]()
        task = asyncio.ensure_future(run())
        assert await asyncio.to_thread(fault.met.wait, LIMIT)
        if arrives in {"at all", "release never"}:
            assert await asyncio.to_thread(eventually, lambda: direct.exists(key))
        await cancel(task)
        assert task.cancelled()
        before = sets(direct)
        if arrives == "late":
            proxy.forget_commands()
            assert await asyncio.to_thread(eventually, lambda: len(proxy.commands) >= 3)  # "missing" is not final
        fault.let_go()
        if arrives == "late":
            assert await asyncio.to_thread(eventually, lambda: sets(direct) > before)
        assert await asyncio.to_thread(freed, direct, key)
        assert await run() == "done"

    asyncio.run(main())
    assert not direct.exists(key)
