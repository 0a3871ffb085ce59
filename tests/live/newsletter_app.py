"""The newsletter's tasks, and each of them with one line taken away: `docs/newsletter.md` names the tests."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import os
from typing import Any

import redis

from examples.newsletter import making, sending
from examples.newsletter.app import RETRIES, TRANSIENT, app
from only_one import current_lock, only_one, retry, skip
from tests.live.crew import note

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


@app.task(**LATE, **AGAIN)
def send_uncovered(mailing: str) -> int:
    """Without the decorator."""
    note("send", mailing, os.getpid())
    return sending.deliver(mailing, lambda: None)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}", lease=1)
def send_unchecked(mailing: str) -> int:
    """Without `ensure_held`."""
    note("send", mailing, os.getpid())
    return sending.deliver(mailing, lambda: None)


@app.task(**LATE, **AGAIN)
@only_one("{name}:{mailing}", lease=1)
def send_checked(mailing: str) -> int:
    """As `send` is, with a short lease."""
    note("send", mailing, os.getpid())
    return sending.deliver(mailing, current_lock().ensure_held)
