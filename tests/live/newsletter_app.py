"""The newsletter's tasks, and each with one line taken away: `examples/newsletter/README.md` names the tests."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from typing import Any

from examples.newsletter import making, sending
from examples.newsletter.app import AGAIN, app
from only_one import only_one, retry
from tests.live.workers import note, wait_at

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


def variant(name: str, decorate: Callable[..., Any], **options: Any) -> Any:
    """`make_chunk` with another decorator, or with other options."""
    return app.task(name=name, **{**AGAIN, **options})(decorate(make))


whole = variant("whole", only_one(KEY, when_busy=retry()))
undecorated = variant("undecorated", lambda function: function)
early = variant("acknowledged early", only_one(KEY, when_busy=retry()), acks_late=False, reject_on_worker_lost=False)
once = variant("once", only_one(KEY, when_busy=retry()), autoretry_for=())


@app.task
def collect(made: list[int | None]) -> list[int | None]:
    """A body that gives what it is given."""
    return made


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
