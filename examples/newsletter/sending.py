"""Sends what was made, from where the journal ends.

The journal has a byte for each recipient of a chunk, which is overwritten when the server has accepted the message.
That needs no room on the disk, which might not be there then, and survives a kill of the process.
A message is sent twice only where the server has accepted it and the journal does not know: the one message that was
under way when the process was killed or the connection broke, and what was not synced when the whole machine is lost.
"""

import logging
import os
import smtplib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from . import making, recipients
from .letter import SENDER
from .making import Entry

WAITING, ACCEPTED, UNSUBSCRIBED, REFUSED = b".", b"a", b"u", b"r"

BATCH = 100
"""Messages between two times that the journal is synced and the database is asked who has unsubscribed."""

PERMANENT = 500
"""From where on an SMTP server's code says that it is no use to try again."""

_log = logging.getLogger(__name__)


class IncompleteError(Exception):
    """Not all chunks are made, so nothing is sent."""


def deliver(mailing: str, check: Callable[[], None]) -> int:
    """Send a mailing, or what is left of it.

    Args:
        mailing: the mailing's name.
        check: called before each message; it raises if somebody else may be sending by now.

    Returns:
        How many messages the server has accepted from this run.

    Raises:
        IncompleteError: not all chunks are made.
        OSError: the server or the disk has failed; what smtplib raises is one, too.
    """
    chunks = recipients.chunks()
    if missing := making.missing(mailing):
        msg = f"{len(missing)} of {chunks} chunks of {mailing} are missing, the first is {missing[0]}"
        raise IncompleteError(msg)
    host, _, port = os.environ["NEWSLETTER_SMTP"].rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=30) as server:
        return sum(_deliver_chunk(server, mailing, number, check) for number in range(chunks))


def _deliver_chunk(server: smtplib.SMTP, mailing: str, number: int, check: Callable[[], None]) -> int:
    first, accepted = number * recipients.SIZE + 1, 0
    with _journal(mailing, number).open("r+b", buffering=0) as journal:
        before = journal.read()
        waiting = (entry for entry in making.read(mailing, number) if before[entry.id - first] == ord(WAITING))
        while batch := list(islice(waiting, BATCH)):
            gone = recipients.unsubscribed(batch[0].id, batch[-1].id)
            for entry in batch:
                check()
                state = UNSUBSCRIBED if entry.id in gone else _post(server, entry)
                journal.seek(entry.id - first)
                journal.write(state)
                accepted += state == ACCEPTED
            os.fsync(journal)
    return accepted


def _journal(mailing: str, number: int) -> Path:
    """The journal of a chunk, which is there as a whole."""
    path = making.path(mailing, number).with_suffix(".journal")
    if not path.exists():
        new = path.with_suffix(".new")
        new.write_bytes(WAITING * recipients.SIZE)
        new.replace(path)
    return path


def journals(mailing: str) -> Iterator[bytes]:
    """The journals of a mailing."""
    return (path.read_bytes() for path in making.path(mailing, 0).parent.glob("*.journal"))


def _post(server: smtplib.SMTP, entry: Entry) -> bytes:
    """Hand one message over; returns what the journal says of it."""
    try:
        server.sendmail(SENDER, [entry.address], entry.message)
    except (smtplib.SMTPRecipientsRefused, smtplib.SMTPDataError) as error:
        code = error.smtp_code if isinstance(error, smtplib.SMTPDataError) else error.recipients[entry.address][0]
        if code < PERMANENT:
            raise
        _log.warning("the message to recipient %d is refused: %s", entry.id, error)
        return REFUSED
    return ACCEPTED
