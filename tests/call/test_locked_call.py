"""What one call leaves behind when it ends in a way of its own: step by step, as ``run`` takes them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from redis import Redis

from only_one import LockUnavailable, configure, only_one
from only_one.call.locked_call import LockedCall
from only_one.clock import now
from only_one.driver import drive
from only_one.lock import renewal
from rigs.waiting import eventually

CLOSED = "redis://127.0.0.1:1/0"
TTL = 600.0


def call_of(prefix: str) -> LockedCall:
    """A call that is about to acquire its key."""
    decoration: Any = only_one(lambda: None, key="k", timeout=TTL).__only_one__  # type: ignore[attr-defined]
    options: Any = decoration.options_for(decoration.plain)
    return LockedCall(options, options.server, options.server.client, decoration.plain, f"{prefix}k")


def test_a_key_of_which_nothing_is_known_is_looked_for_until_it_has_expired(prefix: str) -> None:
    with configure(redis=CLOSED), call_of(prefix) as call:
        before = now()
        with pytest.raises(LockUnavailable):
            call.resolve_acquire(drive(call.client, call.acquire()))
    cleanup = renewal._renewer.pending_releases[call.token]
    assert not cleanup.no_write_in_flight
    assert before + TTL <= cleanup.until <= now() + TTL


def test_a_call_that_is_interrupted_before_its_run_holds_its_key_no_more(redis: Redis, prefix: str) -> None:
    with suppress(KeyboardInterrupt), call_of(prefix) as call:
        assert call.resolve_acquire(drive(call.client, call.acquire()))
        assert call.lease.is_held
        raise KeyboardInterrupt
    assert (call.lease.is_held, call.lease.reason) == (False, "released")
    assert call.token not in renewal._renewer.leases
    assert eventually(lambda: not redis.exists(call.key))
