"""Sends what was made, from where the journal ends.

A message is sent twice only where the server has accepted it and the journal does not know: it is the one message that
was under way when the process was killed or the connection broke, and those since the last `sync` when the whole
machine is lost, a `BATCH` at most.
SMTP has nothing that would make this any narrower: between the server's acceptance and our knowing of it is a network.
"""

from __future__ import annotations

import logging
import os
import smtplib
from collections.abc import Callable, Iterator
from itertools import islice

from . import journal, recipients, spool
from .journal import Journal
from .letter import SENDER
from .recipients import Mailing
from .spool import Entry

SMTP = "NEWSLETTER_SMTP"

BATCH = 100
"""Messages between two times that the journal is synced and the database is asked who has unsubscribed."""

TIMEOUT = 30.0
PERMANENT = 500
"""From where on an SMTP server's code says that it is no use to try again."""

_log = logging.getLogger(__name__)


class IncompleteError(Exception):
    """Not all chunks are made, so nothing is sent."""


def deliver(name: str, check: Callable[[], None]) -> int:
    """Send a mailing, or what is left of it.

    Args:
        name: the mailing's.
        check: called before each message; it raises if somebody else may be sending by now.

    Returns:
        How many messages the server has accepted from this run.

    Raises:
        IncompleteError: not all chunks are made.
        OSError: the server or the disk has failed; what smtplib raises is one, too.
    """
    mailing = recipients.mailing(name)
    if missing := spool.missing(mailing):
        msg = f"{len(missing)} of {mailing.chunks} chunks of {name} are missing, the first is {missing[0]}"
        raise IncompleteError(msg)
    host, _, port = os.environ[SMTP].rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=TIMEOUT) as server:
        server.ehlo_or_helo_if_needed()
        return sum(_deliver_chunk(server, mailing, number, check) for number in range(mailing.chunks))


def _deliver_chunk(server: smtplib.SMTP, mailing: Mailing, number: int, check: Callable[[], None]) -> int:
    accepted = 0
    with Journal(mailing, number) as written:
        if written.is_complete:
            return 0
        for batch in _batches(entry for entry in spool.read(mailing, number) if written.waits(entry.id)):
            gone = recipients.unsubscribed(batch[0].id, batch[-1].id)
            for entry in batch:
                check()
                state = journal.UNSUBSCRIBED if entry.id in gone else _post(server, entry)
                written.note(entry.id, state)
                accepted += state == journal.ACCEPTED
            written.sync()
        written.complete()
    return accepted


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    while batch := list(islice(entries, BATCH)):
        yield batch


def _post(server: smtplib.SMTP, entry: Entry) -> bytes:
    """Hand one message over; returns what the journal says of it."""
    options = ["BODY=8BITMIME"] if server.has_extn("8bitmime") else []
    try:
        server.sendmail(SENDER, [entry.address], entry.message, options)
    except smtplib.SMTPRecipientsRefused as error:
        if error.recipients[entry.address][0] < PERMANENT:
            raise
        _log.warning("recipient %d is refused: %s", entry.id, error)
        return journal.REFUSED
    except smtplib.SMTPDataError as error:
        if error.smtp_code < PERMANENT:
            raise
        _log.warning("the message to recipient %d is refused: %s", entry.id, error)
        return journal.REFUSED
    return journal.ACCEPTED
