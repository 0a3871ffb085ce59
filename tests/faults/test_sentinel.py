"""A real master, its replica, and the Sentinel that watches them: failover while runs hold their keys."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis as redis_py
from celery import Celery
from redis.exceptions import RedisError
from redis.sentinel import MasterNotFoundError, Sentinel

from only_one import LockUnavailable, configure, current_lock, only_one
from only_one.connections.kept_connections import KeptConnections
from only_one.connections.own_pools import SHORT_TIMEOUTS
from rigs.proxy import Proxy
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.clients import clients
from tests.decorated import Decorate, as_async, both, call_both, decorated
from tests.faults.programs import Running, RunningAsync
from tests.renewal import is_renewed, renew_now

HASTE = ("info-period", "publish-period", "ping-period", "ask-period", "min-link-reconnect-period")
"""What a Sentinel does every one to ten seconds, and here every 0.1 s; one that is too old for it takes its time."""


class Watched(NamedTuple):
    """A master, its replica, and a Sentinel, at which what a test decorates asks for the master.

    Attributes:
        master: the master.
        on_replica: a client of what is to take over from it.
        fails_over: has it take over; returns whether it has.
    """

    master: RedisServer
    on_replica: Any
    fails_over: Callable[[], bool]


@pytest.fixture
def watched() -> Iterator[Watched]:
    with clients("Sentinel") as those:
        # A replica that can be written to can be made to miss what its master has not passed on.
        follows = ("--replicaof", f"127.0.0.1 {those.server.port}", "--replica-read-only", "no")
        those.witness.config_set("repl-diskless-sync-delay", 0)
        with (
            redis_server(*follows) as replica,
            redis_py.Redis.from_url(replica.url, socket_timeout=LIMIT) as on_replica,
            those.connect(socket_timeout=1.5) as client,
            configure(redis=client),
        ):
            sentinel: Any = client.connection_pool.sentinel_manager.sentinels[0]
            with suppress(redis_py.ResponseError):
                for period in HASTE:
                    sentinel.execute_command("SENTINEL DEBUG", period, 100)
                # Else one that gets no turn for two seconds does nothing for thirty.
                sentinel.execute_command("SENTINEL DEBUG", "tilt-trigger", 3_600_000)
            # It fails over when it is told to: on a slow machine a master that is well may be late by any time.
            for option, milliseconds in (("down-after-milliseconds", 3_600_000), ("failover-timeout", 3000)):
                sentinel.execute_command("SENTINEL SET", "watched", option, milliseconds)

            def is_well() -> bool:
                replicas = sentinel.sentinel_slaves("watched")
                return (replica.port, "ok") in {(each["port"], each["master-link-status"]) for each in replicas}

            def has_failed_over() -> bool:
                with suppress(RedisError):
                    port = sentinel.sentinel_master("watched")["port"]
                    if port == those.server.port:
                        # It is under way, or the replica is not good enough, or it has been given up for want of time.
                        sentinel.execute_command("SENTINEL FAILOVER", "watched")
                    return bool(port == replica.port and on_replica.info("replication")["role"] == "master")
                return False

            assert eventually(is_well)
            yield Watched(those.server, on_replica, partial(eventually, has_failed_over))


def outcome_of(call: Callable[[], object]) -> object:
    """What a call returns, or that the server could not be asked; never that it ran beside another."""
    try:
        result = call()
    except LockUnavailable as error:
        return error
    assert result != "other"
    return result


@pytest.mark.parametrize("fault", [RedisServer.kill, RedisServer.pause], ids=["killed", "frozen"])
def test_a_failover_during_a_run(watched: Watched, prefix: str, fault: Callable[[RedisServer], None]) -> None:
    """What the master had passed on is kept: renewed on the new one, and released there.

    And what it had not is lost: that run is told, and does not take its key from the next one.
    """
    keys = [f"{prefix}thread", f"{prefix}loop", f"{prefix}lost"]
    call = only_one(lambda: "done", key="new", lease=60)
    on_replica = watched.on_replica
    with (
        Running("thread", lease=60) as thread,
        RunningAsync("loop", lease=60) as loop,
        Running("lost", lease=60) as lost,
    ):
        assert eventually(lambda: on_replica.exists(*keys) == 3)
        assert on_replica.delete(keys[2]) == 1
        fault(watched.master)
        if fault is RedisServer.kill:
            assert isinstance(outcome_of(call), LockUnavailable)
        assert watched.fails_over()
        for key, run in zip(keys, [thread, loop], strict=False):
            on_replica.pexpire(key, 30_000)
            renew_now(run.lock)
            assert eventually(lambda key=key: on_replica.pttl(key) > 30_000)  # type: ignore[misc]
            assert on_replica.get(key) == run.lock.token
            assert run.lock.is_held
        # A connection of the user's own to a frozen master is waited for, once.
        assert eventually(lambda: outcome_of(only_one(lambda: "other", key="thread")) is None)
        assert eventually(lambda: outcome_of(call) == "done")
        renew_now(lost.lock)
        assert eventually(lambda: lost.told)
        on_replica.set(keys[2], "the next one")
    assert [each.told for each in (thread, loop, lost)] == [[], [], ["deleted"]]
    assert on_replica.get(keys[2]) == b"the next one"
    # At once, or in the background if the run's own connection had yet to learn of the new master.
    assert eventually(lambda: not on_replica.exists(keys[0], keys[1], f"{prefix}new"))


@pytest.mark.parametrize("kind", [Running, RunningAsync])
def test_a_master_that_was_replaced_and_does_not_know_it_yet(
    watched: Watched, prefix: str, kind: type[Running]
) -> None:
    """A run whose key it holds is renewed and released on the new one, and is told if that has lost the key."""
    on_replica, key, lost_key = watched.on_replica, f"{prefix}k", f"{prefix}lost"
    with kind(lease=60) as run, kind("lost", lease=60) as lost:
        assert is_renewed(run.lock)
        assert eventually(lambda: on_replica.exists(key, lost_key) == 2)
        assert watched.fails_over()
        on_replica.pexpire(key, 30_000)
        assert on_replica.delete(lost_key) == 1
        assert is_renewed(run.lock)
        assert on_replica.pttl(key) > 30_000
        renew_now(lost.lock)
        assert eventually(lambda: lost.told)
    assert (run.told, lost.told) == ([], ["deleted"])
    assert not on_replica.exists(key)


@both
@pytest.mark.usefixtures("prefix")
def test_the_url_of_a_sentinel_and_one_that_is_cut_off_from_the_others(decorate: Decorate) -> None:
    """The first is told with what to write; the second is not believed."""
    with clients("Sentinel") as those:
        for database in (0, 1):
            url = f"redis://127.0.0.1:{those.sentinel_port}/{database}?socket_timeout={LIMIT}"
            with pytest.raises(LockUnavailable, match=r"write redis=Sentinel\(\[...\]\)\.master_for"):
                decorate(lambda: "done", redis=url)()
        sentinels: Any = Sentinel([("127.0.0.1", those.sentinel_port)], min_other_sentinels=1)  # type: ignore[no-untyped-call]
        with pytest.raises(LockUnavailable, match="No master found"):
            decorate(lambda: "done", redis=sentinels.master_for("watched"))()


@pytest.mark.skipif(redis_py.__version__.startswith("5."), reason="its asyncio class takes no number, as Celery's is")
@pytest.mark.usefixtures("prefix")
def test_a_master_that_speaks_tls_at_the_client_of_celery_s_backend() -> None:
    """Celery has a connection class of its own for it, which is like redis-py's."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    certificate = Path(__file__).with_name("tls.pem")
    context.load_cert_chain(certificate)
    with clients("Sentinel") as those, Proxy(those.server.url, tls=context) as proxy:
        with redis_py.Redis(port=those.sentinel_port) as sentinel:
            sentinel.execute_command("SENTINEL MONITOR", "speaks tls", "127.0.0.1", proxy.port, 1)
        app = Celery(backend=f"sentinel://127.0.0.1:{those.sentinel_port}", set_as_current=False)
        app.conf.result_backend_transport_options = {"master_name": "speaks tls"}
        app.conf.redis_backend_use_ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(certificate)}
        with app.backend.client as client:
            assert call_both(redis=client) == ["ran", "ran"]


def test_the_renewing_thread_asks_one_sentinel_at_a_time() -> None:
    """All may be silent, and other servers have keys to renew."""
    with clients("Sentinel") as those:
        sentinel_url = f"redis://127.0.0.1:{those.sentinel_port}"
        with Proxy(sentinel_url) as first, Proxy(sentinel_url) as second:
            manager: Any = Sentinel([("127.0.0.1", each.port) for each in (first, second)])  # type: ignore[no-untyped-call]
            of_thread = KeptConnections(manager.master_for("unknown").connection_pool, SHORT_TIMEOUTS)
            for asked in ([1, 0], [1, 1], [2, 1]):
                with pytest.raises(MasterNotFoundError):
                    of_thread.send([("GET", "k")])
                assert [each.commands.count("SENTINEL") for each in (first, second)] == asked


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.usefixtures("prefix")
def test_calls_that_ask_the_sentinels_at_once_ask_each_of_them_again_later(*, is_async: bool) -> None:
    """redis-py puts the Sentinel that answers first in its list, and of two calls at once, one would lose another."""
    with clients("Sentinel") as those, redis_py.Redis(port=those.server.port, db=1) as database:
        sentinel_url = f"redis://127.0.0.1:{those.sentinel_port}"
        with Proxy(sentinel_url) as first, Proxy(sentinel_url) as second:
            manager: Any = Sentinel([("127.0.0.1", each.port) for each in (first, second)])  # type: ignore[no-untyped-call]

            def body(number: int) -> int:
                assert database.exists(current_lock().key)
                return number

            body_of_kind = as_async(body) if is_async else body
            work = decorated(body_of_kind, "{number}", redis=manager.master_for("watched", db=1))
            call = work if is_async else partial(asyncio.to_thread, work)

            async def at_once() -> Any:
                return await asyncio.gather(*map(call, range(5)))

            async def main() -> None:
                with first.refused():
                    assert await at_once() == [0, 1, 2, 3, 4]
                those.break_connections()
                with second.refused():
                    assert await at_once() == [0, 1, 2, 3, 4]

            asyncio.run(main())
