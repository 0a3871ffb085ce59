"""Makes one chunk of a mailing."""

from __future__ import annotations

from . import recipients, spool
from .letter import Letter


def make(name: str, number: int) -> int:
    """Make a chunk, if it is not made.

    Args:
        name: the mailing's.
        number: which chunk, from 0.

    Returns:
        How many messages it has.
    """
    mailing = recipients.mailing(name)
    if spool.path(mailing, number).exists():
        return spool.count(mailing, number)
    letter = Letter(name)
    people = recipients.chunk(mailing, number)
    return spool.write(mailing, number, (spool.Entry(each.id, each.email, letter.to(each)) for each in people))
