"""The newsletter's worker, in which a chunk is made, and a message sent, when the test says so: no other has it."""

from __future__ import annotations

import os
from typing import Any

from examples.newsletter import making, sending
from examples.newsletter.app import app
from examples.newsletter.making import Entry
from tests.live.workers import note, wait_at

app.conf.only_one_lease = 6
_make, _post = making.make, sending._post


def make(mailing: str, number: int) -> int:
    """Make a chunk; that to which things happen, when the test says so."""
    if number == int(os.environ["STUCK_CHUNK"]):
        note("make", mailing)
        wait_at(mailing)
    return _make(mailing, number)


def post(server: Any, entry: Entry) -> bytes:
    """Hand a message over; that to which things happen, when the test says so."""
    if entry.id == int(os.environ["STUCK_MESSAGE"]):
        wait_at("message")
    return _post(server, entry)


making.make, sending._post = make, post
