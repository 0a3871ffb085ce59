"""The newsletter's tasks, and each with one line taken away: `examples/newsletter/README.md` names the tests."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import redis
from celery.signals import task_retry

from examples.newsletter import making, recipients, sending
from examples.newsletter.app import AGAIN, app
from only_one import only_one, retry, skip
from tests.live.workers import note, wait_at

TROUBLE = "trouble"
"""As long as this file is there, whoever retries waits, so that no attempt is used up before the test has mended it."""

STUCK = 1
"""The chunk to which things happen."""

KEY = "{name}:{mailing}:{number}"

app.conf.only_one_lease = 6


def make(mailing: str, number: int) -> int:
    """Make a chunk, as `make_chunk` does; that to which things happen, when the test says so."""
    note("make", mailing, number, os.getpid())
    if number == STUCK:
        wait_at(mailing)
    return making.make(mailing, number)


def cookbook(function: Callable[[str, int], int]) -> Callable[[str, int], int | None]:
    """The lock of Celery's cookbook in the decorator's place: SET NX, an expiry, and DEL at the end."""

    @wraps(function)
    def locked(mailing: str, number: int) -> int | None:
        client: Any = redis.Redis.from_url(os.environ["LIVE_URL"])
        key = f"cookbook:{mailing}:{number}"
        if not client.set(key, 1, nx=True, ex=600):
            return None
        try:
            return function(mailing, number)
        finally:
            client.delete(key)

    return locked


def variant(name: str, decorate: Callable[..., Any], **options: Any) -> Any:
    """`make_chunk` with another decorator, or with other options."""
    return app.task(name=name, **{**AGAIN, **options})(decorate(make))


whole = variant("whole", only_one(KEY, when_busy=retry()))
undecorated = variant("undecorated", lambda function: function)
skipping = variant("skipping", only_one(KEY, when_busy=skip))
refusing = variant("refusing", only_one(KEY))
with_the_cookbook_s = variant("cookbook", cookbook)
early = variant("acknowledged early", only_one(KEY, when_busy=retry()), acks_late=False, reject_on_worker_lost=False)
once = variant("once", only_one(KEY, when_busy=retry()), autoretry_for=())


@app.task
def collect(made: list[int | None]) -> list[int | None]:
    """A body that gives what it is given."""
    return made


@task_retry.connect(weak=False)
def wait_until_it_is_mended(**_: object) -> None:
    """Write down that something has failed and is retried."""
    trouble = recipients.directory() / TROUBLE
    if trouble.exists():
        note("retry")
    while trouble.exists():
        time.sleep(0.01)


@app.task(**AGAIN)
def send_undecorated(mailing: str) -> int:
    """Without the decorator; it waits with the first message in hand."""

    @cache
    def wait() -> None:
        note("send", mailing, os.getpid())
        wait_at(mailing)

    return sending.deliver(mailing, wait)


@app.task(**AGAIN)
@only_one("{name}:{mailing}")
def send_unchecked(mailing: str) -> int:
    """Without `ensure_held`."""
    return sending.deliver(mailing, lambda: None)
