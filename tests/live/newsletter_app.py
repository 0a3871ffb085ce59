"""The newsletter's worker, in which a chunk is made when the test says so; nobody else imports this."""

from __future__ import annotations

import os

from examples.newsletter import making
from examples.newsletter.app import app
from tests.live.workers import note, wait_at

app.conf.only_one_lease = 6
_make = making.make


def make(mailing: str, number: int) -> int:
    """Make a chunk; that to which things happen, when the test says so."""
    note("make", mailing, number, os.getpid())
    if number == int(os.environ["STUCK_CHUNK"]):
        wait_at(mailing)
    return _make(mailing, number)


making.make = make
