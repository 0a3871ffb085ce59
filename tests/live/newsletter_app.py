"""The newsletter's tasks, and each of them with one line taken away: `docs/newsletter.md` names the tests."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from math import inf
from typing import Any

import redis
from celery.signals import task_retry

from examples.newsletter import making, places, sending
from examples.newsletter.app import RETRIES, TRANSIENT, app
from only_one import current_lock, only_one, retry, skip
from only_one.lock.commands import now
from tests.live.workers import note, wait_at

TROUBLE = "trouble"
"""As long as this file is there, whoever retries waits, so that no attempt is used up before the test has mended it."""

LATE = {"acks_late": True, "reject_on_worker_lost": True}
AGAIN = {"autoretry_for": TRANSIENT, "retry_backoff": True, "max_retries": RETRIES}


def _make(mailing: str, number: int) -> int:
    note("make", mailing, number, os.getpid())
    return making.make(mailing, number)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}:{number}", when_busy=retry())
def whole(mailing: str, number: int) -> int:
    """As `make_chunk` is, with nothing taken away."""
    return _make(mailing, number)


@app.task(**LATE, **AGAIN)
def uncovered(mailing: str, number: int) -> int:
    """Without the decorator."""
    return _make(mailing, number)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}:{number}", when_busy=skip)
def skipping(mailing: str, number: int) -> int:
    """With the policy that gives None, as other locks do."""
    return _make(mailing, number)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}:{number}")
def refusing(mailing: str, number: int) -> int:
    """Without `when_busy`."""
    return _make(mailing, number)


@app.task(**LATE, **AGAIN)
def cookbook(mailing: str, number: int) -> int | None:
    """With the lock of Celery's cookbook in the decorator's place: SET NX, an expiry, and DEL at the end."""
    client: Any = redis.Redis.from_url(os.environ["LIVE_URL"])
    key = f"cookbook:{mailing}:{number}"
    if not client.set(key, 1, nx=True, ex=600):
        return None
    try:
        return _make(mailing, number)
    finally:
        client.delete(key)


@app.task(**AGAIN)
@only_one("{name}:{mailing}:{number}", when_busy=retry())
def early(mailing: str, number: int) -> int:
    """Without `acks_late` and `reject_on_worker_lost`."""
    return _make(mailing, number)


@app.task(**LATE)
@only_one("{name}:{mailing}:{number}", when_busy=retry())
def once(mailing: str, number: int) -> int:
    """Without `autoretry_for`."""
    return _make(mailing, number)


@app.task
def collect(made: list[int | None]) -> list[int | None]:
    """A body that gives what it is given."""
    return made


@task_retry.connect(weak=False)
def wait_until_it_is_mended(**_: object) -> None:
    """Tell that something has failed, and is to be tried again."""
    trouble = places.directory() / TROUBLE
    if trouble.exists():
        note("retry")
    while trouble.exists():
        time.sleep(0.01)


def _wait_with_a_batch_in_hand(mailing: str) -> None:
    note("send", mailing, os.getpid())
    wait_at(mailing)


@app.task(**LATE, **AGAIN)
def send_uncovered(mailing: str) -> int:
    """Without the decorator."""
    return sending.deliver(mailing, cache(partial(_wait_with_a_batch_in_hand, mailing)))


def _pause_for_longer_than_the_lease() -> None:
    """Stop this process until somebody lets it go on; its lease has been renewed a minute before."""
    lease: Any = current_lock()
    lease.renew_at = inf
    lease.server.client.pexpire(lease.key, 1)
    lease.expires_at = now()
    os.kill(os.getpid(), signal.SIGSTOP)


def _deliver(mailing: str, check: Callable[[], None], pause_at: int) -> int:
    note("send", mailing, os.getpid())
    asked = 0

    def asking() -> None:
        nonlocal asked
        asked += 1
        if asked == pause_at:
            _pause_for_longer_than_the_lease()
        check()

    return sending.deliver(mailing, asking)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}", lease=60)
def send_unchecked(mailing: str, pause_at: int = 0) -> int:
    """Without `ensure_held`."""
    return _deliver(mailing, lambda: None, pause_at)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}", lease=60)
def send_checked(mailing: str, pause_at: int = 0) -> int:
    """As `send` is."""
    return _deliver(mailing, current_lock().ensure_held, pause_at)
