"""A real master, its replica, and the Sentinels that watch them: failover while a run holds its key."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
import redis as redis_py
import redis.sentinel
from redis.exceptions import RedisError

from only_one import LockLost, LockUnavailable, configure, fail, only_one
from only_one.testing import PORTS, RedisServer, _find_binary, guarded, redis_server
from tests.faults.programs import Running, RunningAsync
from tests.waiting import eventually

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])

SERVICE = "mymaster"
CONFIGURATION = """
bind 127.0.0.1
port {port}
dir {directory}
sentinel monitor mymaster 127.0.0.1 {master} 2
sentinel down-after-milliseconds mymaster 500
sentinel failover-timeout mymaster 3000
"""
LEASE = 8.0
"""Seconds; longer than Sentinels that are told to hurry need for a failover."""


class Watched:
    """A master, a replica, and three Sentinels.

    Attributes:
        master: the first master.
        replica: what takes over from it.
        client: a client as users have it, which is sent to the master by the Sentinels.
    """

    def __init__(self, stack: ExitStack, directory: Path) -> None:
        self.master = stack.enter_context(redis_server("--repl-diskless-sync-delay", "0"))
        # One that can be written to can be made to miss what its master has not passed on.
        follows = ("--replicaof", f"127.0.0.1 {self.master.port}", "--replica-read-only", "no")
        self.replica = stack.enter_context(redis_server(*follows))
        self.on_master, self.on_replica = (direct(server) for server in (self.master, self.replica))
        ports = SystemRandom().sample(PORTS, 3)
        self._sentinels = [direct(self._start(stack, directory / str(port), port)) for port in ports]
        assert eventually(self.is_well, 20)
        kind: Any = redis.sentinel.Sentinel
        manager = kind([("127.0.0.1", port) for port in ports], socket_timeout=1)
        self.client: Any = manager.master_for(SERVICE, socket_timeout=1)

    def _start(self, stack: ExitStack, directory: Path, port: int) -> str:
        directory.mkdir()
        file = directory / "sentinel.conf"
        file.write_text(CONFIGURATION.format(port=port, directory=directory, master=self.master.port))
        command = [_find_binary(), str(file), "--sentinel"]
        stack.enter_context(guarded(command, stdout=subprocess.DEVNULL))
        return f"redis://127.0.0.1:{port}"

    def is_well(self) -> bool:
        """Whether each Sentinel knows the two others, and a replica that is up to date."""
        with suppress(RedisError):
            masters = [sentinel.sentinel_master(SERVICE) for sentinel in self._sentinels]
            replicas = [sentinel.sentinel_slaves(SERVICE) for sentinel in self._sentinels]
            return all(each["num-other-sentinels"] == 2 and not each["is_sdown"] for each in masters) and all(
                len(each) == 1 and each[0]["master-link-status"] == "ok" for each in replicas
            )
        return False

    def has_failed_over(self) -> bool:
        """Whether the replica is the master, and all Sentinels say so."""
        with suppress(RedisError):
            ports = [sentinel.sentinel_master(SERVICE)["port"] for sentinel in self._sentinels]
            return ports == [self.replica.port] * 3 and self.on_replica.info("replication")["role"] == "master"
        return False


def direct(server: RedisServer | str) -> Any:
    """A client of one server, past all Sentinels."""
    url = server if isinstance(server, str) else server.url
    return redis_py.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)


@pytest.fixture
def watched(prefix: str, tmp_path: Path) -> Iterator[Watched]:
    """What a test covers takes its keys there."""
    assert prefix
    with ExitStack() as stack:
        watched = Watched(stack, tmp_path)
        with configure(redis=watched.client):
            yield watched
        watched.client.close()


def freeze(server: RedisServer) -> None:
    server.pause()


def kill(server: RedisServer) -> None:
    server.kill()


def is_renewed(client: Any, key: str) -> bool:
    """Whether the time that a key is to live is lengthened, as a server says."""
    seen: list[int] = []

    def has_risen() -> bool:
        seen.append(client.pttl(key))
        return min(seen) > 0 and seen[-1] > min(seen) + 50

    return eventually(has_risen)


def outcome_of(call: Callable[[], object]) -> object:
    """What a call returns, or that the server could not be asked; never that it ran beside another."""
    try:
        result = call()
    except LockUnavailable as error:
        return error
    assert result != "other"
    return result


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(Running, kill), (RunningAsync, kill), (Running, freeze), (RunningAsync, freeze)],
    ids=["sync-killed", "async-killed", "sync-frozen", "async-frozen"],
)
def test_a_failover_during_a_run(
    watched: Watched, prefix: str, kind: type[Running], fault: Callable[[RedisServer], None]
) -> None:
    """What the master had passed on is kept: renewed on the new one, and given back there."""
    told: list[object] = []
    key = f"{prefix}k"
    with kind(lease=LEASE, when_lost=told.append) as run:
        assert watched.on_master.wait(1, 2000) == 1
        begun = time.monotonic()
        fault(watched.master)
        assert eventually(watched.has_failed_over, 20)
        print(f"failed over after {time.monotonic() - begun:.1f} s")
        assert is_renewed(watched.on_replica, key)
        assert run.lock.is_held
        assert watched.on_replica.get(key) == run.lock.token
        # A connection of the user's own to a frozen master is waited for, once.
        assert eventually(lambda: outcome_of(only_one(lambda: "other", key="k")) is None, 20)
    assert run.result == "done"
    assert told == []
    # At once, or in the background if the run's own connection had yet to learn of the new master.
    assert eventually(lambda: not watched.on_replica.exists(key))
    with kind() as later:
        assert watched.on_replica.get(key) == later.lock.token
    assert later.result == "done"
    assert eventually(lambda: not watched.on_replica.exists(key))


def test_a_failover_that_loses_the_key(watched: Watched, prefix: str) -> None:
    """What the master had not passed on: the run is told, and does not take it from the next one."""
    key = f"{prefix}k"
    with Running(lease=LEASE, when_lost=fail) as run:
        assert watched.on_master.wait(1, 2000) == 1
        assert watched.on_replica.delete(key) == 1
        watched.master.kill()
        assert eventually(watched.has_failed_over, 20)
        assert eventually(lambda: not run.lock.is_held)
        with Running(lease=LEASE) as later:
            assert watched.on_replica.get(key) == later.lock.token
            run.finish.set()
            assert isinstance(run.join(), LockLost)
            assert run.result.reason == "deleted"
            assert watched.on_replica.get(key) == later.lock.token
        assert later.result == "done"


def test_calls_while_there_is_no_master(watched: Watched, prefix: str) -> None:
    """They say so, and leave nothing that blocks others for longer than they would have had the key."""
    key = f"{prefix}k"
    call = only_one(lambda: "done", key="k", lease=60)
    assert call() == "done"
    watched.master.kill()
    outcomes: list[object] = []

    def succeeds() -> bool:
        outcomes.append(outcome_of(call))
        return outcomes[-1] == "done"

    assert eventually(succeeds, 20)
    assert isinstance(outcomes[0], LockUnavailable)
    assert None not in outcomes
    assert eventually(watched.has_failed_over)
    assert eventually(lambda: not watched.on_replica.exists(key))
