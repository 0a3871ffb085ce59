"""One lease, by a clock that stands still: what is known of it, and when exactly its key is lost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from only_one import ConfigurationError, LockLost
from only_one.driver import drive
from only_one.lock import lease
from only_one.lock.commands import RENEW, evaluate
from only_one.lock.lease import Lease
from rigs.waiting import LIMIT
from tests.lock.watched import LONG, Watch
from tests.renewal import MOMENT, Clock

Make = Callable[..., Lease]


@pytest.fixture
def make(watch: Watch, redis_url: str) -> Make:
    """A callable that makes the lease of a held key for `ttl` seconds, to be renewed until `limit`."""
    return lambda ttl, limit: watch.lease(watch.server(redis_url), ttl=ttl, limit=limit)


asks = pytest.mark.parametrize("ask", [lambda lock: lock.fence, lambda lock: lock.extend(60)], ids=["fence", "extend"])


@pytest.mark.parametrize(("limit", "reason"), [(LONG, "overrun"), (2 * LONG, "expired")])
@asks
def test_a_lease_is_lost_at_its_end_and_not_before(
    clock: Clock, make: Make, limit: float, reason: str, ask: Callable[[Lease], object]
) -> None:
    lock = make(LONG, limit)
    lock.trouble = OSError()  # of the last renewal, which has not come in time
    clock.moment += LONG - 1
    assert (lock.is_held, lock.expires_in, lock.loss()) == (True, 1.0, None)
    for _ in range(2):
        clock.moment += 1
        assert (lock.is_held, lock.expires_in) == (False, 0.0)
        with pytest.raises(LockLost) as caught:
            ask(lock)  # though the key is still there
        assert (caught.value.reason, caught.value.value) == (reason, "")
        assert caught.value.__cause__ is (lock.trouble if reason == "expired" else None)
        assert lock.reason_by(None) == reason  # of a reply that has come too late, too
    assert lock.reason is None  # nobody has noted it


@pytest.mark.parametrize(("renewed", "gets"), [(False, 3 * LONG - 1), (True, LONG)])
def test_a_lease_that_is_extended(clock: Clock, make: Make, redis: Any, *, renewed: bool, gets: float) -> None:
    """One that is renewed gets its lease again, and is renewed for longer."""
    lock = make(LONG, 2 * LONG) if renewed else make(2 * LONG, 2 * LONG)
    woken: list[float] = []
    lock.renewer = SimpleNamespace(wake_by=woken.append)
    assert lock.renew_at == MOMENT + (LONG / 3 if renewed else 2 * LONG)
    clock.moment += 1
    lock.extend(LONG)
    assert lock.ends_at == MOMENT + 3 * LONG
    assert lock.expires_at == MOMENT + 1 + gets
    assert lock.renew_at == (MOMENT + 1 + LONG / 3 if renewed else lock.ends_at)
    assert (gets - LIMIT) * 1000 < redis.pttl(lock.key) <= gets * 1000
    assert woken == [lock.renew_at]  # else the thread sleeps until the end that was planned before


def test_a_lease_that_is_extended_by_less_than_itself_ends_with_the_run(clock: Clock, make: Make, redis: Any) -> None:
    lock = make(LONG, 2 * LONG)
    clock.moment += 2 * LONG - 1
    lock.note_expiry(clock.moment, 1)
    redis.persist(lock.key)
    lock.extend(1)
    assert lock.expires_at == lock.ends_at == clock.moment + 2
    assert redis.pttl(lock.key) <= 2000


@pytest.mark.parametrize(
    ("value", "reason", "shown"), [(None, "deleted", ""), (b"\xff", "taken", r"\xff")], ids=["deleted", "taken"]
)
@asks
def test_a_key_that_is_not_ours_any_more(make: Make, redis: Any, value: Any, reason: str, shown: str, ask: Any) -> None:
    lock = make(LONG, LONG)
    lock.trouble = OSError()  # of a renewal before, which is not why
    redis.set(lock.key, value) if value else redis.delete(lock.key)
    for _ in range(2):
        with pytest.raises(LockLost) as caught:
            ask(lock)
        lost = caught.value
        assert (lost.key, lost.reason, lost.value, lost.__cause__) == (lock.key, reason, shown, None)
        assert lock.reason == reason
    assert (lock.ends_at, lock.expires_at) == (MOMENT + LONG, MOMENT + LONG)


def test_a_command_that_gives_less_and_arrives_after_an_extension_takes_no_time_away(make: Make, redis: Any) -> None:
    """As a renewal does whose connection is slow, or the first of two commands where one is sent again."""
    lock = make(LONG, LONG)
    lock.extend(LONG)
    drive(redis, evaluate(RENEW, lock.key, lock.token, 1000))
    assert redis.pttl(lock.key) > (2 * LONG - LIMIT) * 1000
    lock.note_expiry(MOMENT - 1, LONG)
    assert lock.expires_at == MOMENT + 2 * LONG


def test_an_extension_whose_reply_comes_after_the_loss_was_told_is_none(
    clock: Clock, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_late(*command: Any) -> Any:
        reply = drive(*command)
        lock.lose("overrun")  # as the renewing thread does
        return reply

    lock = make(LONG, LONG)
    monkeypatch.setattr(lease, "drive", answer_late)
    with pytest.raises(LockLost) as caught:
        lock.extend(LONG)
    assert (caught.value.reason, caught.value.value) == ("overrun", "")
    assert lock.ends_at == clock.moment + LONG


def test_an_extension_that_could_not_work_is_refused(make: Make) -> None:
    with pytest.raises(ConfigurationError, match=r"^extend=.*seconds; to release the key, return"):
        make(LONG, LONG).extend(0)


@pytest.mark.usefixtures("clock")
def test_a_lease_where_the_locking_is_off() -> None:
    """Fencing tokens are the machine's own time, and all time is given that is asked for."""
    lock = Lease(None, "k", b"", MOMENT, math.inf, math.inf)
    assert lock.fence == lock.fence == pytest.approx(time.time() * 1_000_000, abs=LIMIT * 1_000_000)
    lock.extend(60)
    assert lock.is_held
