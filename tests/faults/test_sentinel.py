"""A real master, its replica, and the Sentinels that watch them: failover while runs hold their keys."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
import redis.sentinel
from redis.exceptions import RedisError

from only_one import LockLost, LockUnavailable, configure, fail, only_one
from only_one.testing import Guarded, _find_binary
from rigs.servers import RedisServer, free_ports, redis_server
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import Running, RunningAsync
from tests.renewal import renew_now

SERVICE = "mymaster"
# They fail over when they are told to: on a slow machine a master that is well may be late by any time.
CONFIGURATION = """
bind 127.0.0.1
port {port}
dir {directory}
sentinel monitor mymaster 127.0.0.1 {master} 2
sentinel down-after-milliseconds mymaster 3600000
sentinel failover-timeout mymaster 3000
"""
HASTE = ("info-period", "publish-period", "ping-period", "ask-period", "min-link-reconnect-period")
"""What Sentinels do every one to ten seconds, and here every 0.1 s; a server that is too old for it takes its time."""


class Watched:
    """A master, its replica, and three Sentinels.

    Attributes:
        master: the master.
        replica: what is to take over from it.
        client: a client as users have it, which is sent to the master by the Sentinels.
        has_failed_over: whether the replica has taken over.
    """

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self._stack = stack
        self.has_failed_over = False
        self.master = stack.enter_context(redis_server("--repl-diskless-sync-delay", "0"))
        self.replica = self._start_replica()
        ports = free_ports(3)
        self._sentinels = [direct(self._start_sentinel(directory / str(port), port)) for port in ports]
        assert eventually(self._are_hastened)
        assert eventually(self.is_well)
        kind: Any = redis.sentinel.Sentinel
        manager = kind([("127.0.0.1", port) for port in ports], socket_timeout=3)
        self.client: Any = manager.master_for(SERVICE, socket_timeout=1.5)

    def _start_replica(self) -> RedisServer:
        # One that can be written to can be made to miss what its master has not passed on.
        follows = ("--replicaof", f"127.0.0.1 {self.master.port}", "--replica-read-only", "no")
        return self._stack.enter_context(redis_server("--repl-diskless-sync-delay", "0", *follows))

    def _start_sentinel(self, directory: Path, port: int) -> str:
        directory.mkdir()
        file = directory / "sentinel.conf"
        file.write_text(CONFIGURATION.format(port=port, directory=directory, master=self.master.port))
        command = [_find_binary(), str(file), "--sentinel"]
        self._stack.enter_context(Guarded(command, stdout=subprocess.DEVNULL))
        return f"redis://127.0.0.1:{port}"

    def _are_hastened(self) -> bool:
        with suppress(redis_py.ConnectionError):
            for sentinel in self._sentinels:
                with suppress(redis_py.ResponseError):
                    for period in HASTE:
                        sentinel.execute_command("SENTINEL DEBUG", period, 100)
                    # Else one that gets no turn for two seconds does nothing for thirty.
                    sentinel.execute_command("SENTINEL DEBUG", "tilt-trigger", 3_600_000)
            return True
        return False

    def is_well(self) -> bool:
        """Whether each Sentinel knows the two others, and a replica that is up to date."""
        with suppress(RedisError):
            masters = [sentinel.sentinel_master(SERVICE) for sentinel in self._sentinels]
            replicas = [sentinel.sentinel_slaves(SERVICE) for sentinel in self._sentinels]
            return all(each["num-other-sentinels"] == 2 for each in masters) and all(
                (self.replica.port, "ok") in {(found["port"], found["master-link-status"]) for found in each}
                for each in replicas
            )
        return False

    def fail_over(self) -> bool:
        """Have the replica take over; returns whether it has, and all Sentinels say so."""

        def has_happened() -> bool:
            with suppress(RedisError):
                ports = [sentinel.sentinel_master(SERVICE)["port"] for sentinel in self._sentinels]
                if ports[0] == self.master.port:
                    # It is under way, or it knows of no replica that is good enough, or has given up for want of time.
                    self._sentinels[0].execute_command("SENTINEL FAILOVER", SERVICE)
                return ports == [self.replica.port] * 3 and on_replica.info("replication")["role"] == "master"
            return False

        self.has_failed_over = True
        with direct(self.replica) as on_replica:
            return eventually(has_happened)

    def replace_master(self) -> None:
        """Go on with what has taken over, and a new replica of it."""
        self.master.stop()
        self.master = self.replica
        self.replica = self._start_replica()
        self.has_failed_over = False
        assert eventually(self.is_well)


def direct(server: RedisServer | str) -> Any:
    """A client of one server, past all Sentinels."""
    url = server if isinstance(server, str) else server.url
    return redis_py.Redis.from_url(url, socket_timeout=LIMIT, socket_connect_timeout=LIMIT)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with ExitStack() as stack:
        watched = Watched(stack, tmp_path_factory.mktemp("sentinels"))
        yield watched
        watched.client.close()


@pytest.fixture
def watched(three: Watched, prefix: str) -> Iterator[Watched]:
    """What a test covers takes its keys there."""
    assert prefix
    if three.has_failed_over:
        three.replace_master()
    with configure(redis=three.client):
        yield three


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
    """What the master had passed on is kept: renewed on the new one, and given back there.

    And what it had not is lost: that run is told, and does not take its key from the next one.
    """
    told: list[object] = []
    keys = [f"{prefix}thread", f"{prefix}loop", f"{prefix}lost"]
    call = only_one(lambda: "done", key="new", lease=60)
    with (
        direct(watched.master) as on_master,
        direct(watched.replica) as on_replica,
        Running("lost", lease=60, when_lost=fail) as lost,
    ):
        with (
            Running("thread", lease=60, when_lost=told.append) as thread,
            RunningAsync("loop", lease=60, when_lost=told.append) as loop,
        ):
            # What renews waits for none of them for long, whatever the user's client does.
            background = thread.lock.server.node_of("").client.connection_pool
            for pool in (background, *(each.connection_pool for each in background.sentinel_manager.sentinels)):
                assert pool.connection_kwargs["socket_timeout"] == 0.5
            on_master.wait(1, round(LIMIT * 1000))
            assert on_replica.exists(*keys) == 3
            assert on_replica.delete(keys[2]) == 1
            fault(watched.master)
            if fault is RedisServer.kill:
                assert isinstance(outcome_of(call), LockUnavailable)
            assert watched.fail_over()
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
            assert eventually(lambda: not lost.lock.is_held)
            with Running("lost", lease=60) as later:
                assert on_replica.get(keys[2]) == later.lock.token
                lost.finish.set()
                assert isinstance(lost.join(), LockLost)
                assert lost.result.reason == "deleted"
                assert on_replica.get(keys[2]) == later.lock.token
        assert thread.result == loop.result == later.result == "done"
        assert told == []
        # At once, or in the background if the run's own connection had yet to learn of the new master.
        assert eventually(lambda: not on_replica.exists(*keys, f"{prefix}new"))
