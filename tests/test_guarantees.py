"""The page that says what is promised: it names tests that exist, and here is what no other module shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import redis as redis_py

from only_one.testing import redis_server
from tests.faults.programs import Running
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_each_test_that_is_named_exists() -> None:
    named = NAMED.findall((ROOT / "docs" / "guarantees.md").read_text())
    assert len(named) > 30
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (ROOT / path).exists() or f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


@pytest.mark.parametrize("policy", ["volatile-lru", "volatile-ttl", "allkeys-lru", "allkeys-random", "noeviction"])
def test_a_key_that_is_evicted(prefix: str, policy: str) -> None:
    """Its run is told as of any key that was deleted; a server that evicts nothing refuses others' writes instead."""
    told: list[str] = []
    with (
        redis_server("--maxmemory", "3mb", "--maxmemory-policy", policy) as server,
        redis_py.Redis.from_url(server.url) as client,
        # Renewed so seldom that it is the one used the longest time ago: the server counts in whole seconds.
        Running(lease=4.5, redis=server.url, when_lost=lambda lost: told.append(lost.reason)) as run,
    ):

        def is_gone_or_refused() -> bool:
            try:
                client.mset({f"filler {number} {client.dbsize()}": b"." * 2000 for number in range(100)})
            except redis_py.ResponseError as error:
                assert "maxmemory" in str(error)  # noqa: PT017 - others would be others' faults
                return True
            return not client.exists(f"{prefix}k")

        assert eventually(is_gone_or_refused)
        if policy == "noeviction":
            assert not eventually(lambda: not run.lock.is_held, 1.2)  # it was renewed, though no memory is left
        else:
            assert eventually(lambda: told == ["deleted"])
            assert not run.lock.is_held
    assert run.result == "done"
    assert told == ([] if policy == "noeviction" else ["deleted"])
