"""Connections that break while runs hold their keys, of threads and of event loops; for clients see `test_leases`."""

from __future__ import annotations

from typing import Any

import pytest
from redis import Redis

from only_one.testing import redis_server
from rigs.proxy import Proxy
from rigs.waiting import eventually
from tests.faults.programs import Running
from tests.renewal import fails_to_renew, is_renewed, later


@pytest.mark.parametrize("way", ["cut", "black_hole"])
def test_a_connection_that_is_gone_for_less_than_the_lease_or_for_more(
    redis: Any, redis_url: str, way: str, kind: type[Running]
) -> None:
    """In between the key is kept, and then it is lost by the holder's own clock, though nobody can be asked."""
    with Proxy(redis_url) as proxy, kind(lease=60, redis=proxy.url) as run:
        with getattr(proxy, way)():
            assert fails_to_renew(run.lock)
        assert is_renewed(run.lock)
        assert redis.get(run.lock.key) == run.lock.token
        assert run.told == []
        with getattr(proxy, way)(), later(60):
            assert eventually(lambda: run.told)
    assert run.told == ["expired"]  # once, though the end found it out, too


def test_a_server_s_name_that_moves_to_the_new_master_while_the_old_one_goes_on_as_its_replica(
    kind: type[Running],
) -> None:
    """The connections to the old one stay open, and each command there is refused."""
    with (
        redis_server("--repl-diskless-sync-delay", "0") as old,
        redis_server() as new,
        Proxy(old.url) as proxy,
        Redis.from_url(old.url) as former,
        Redis.from_url(new.url) as master,
    ):
        master.replicaof("127.0.0.1", str(old.port))
        with kind(lease=60, redis=proxy.url) as run:
            assert eventually(lambda: master.exists(run.lock.key))
            assert eventually(lambda: "INFO" in proxy.commands)  # the thread that renews has connected to the old one
            master.replicaof("NO", "ONE")
            proxy.lead_to(new.url)
            former.replicaof("127.0.0.1", str(new.port))
            assert fails_to_renew(run.lock)
            assert is_renewed(run.lock)
        assert eventually(lambda: not master.exists(run.lock.key))
        with kind(lease=60, redis=proxy.url) as run:
            assert master.exists(run.lock.key)
