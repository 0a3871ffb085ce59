"""Makes a chunk of a mailing: its messages, in a file that is there as a whole or not at all.

A line of the file is a message, as JSON.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import recipients
from .letter import letter


class Entry(NamedTuple):
    """A message that is ready to be sent, and its recipient."""

    id: int
    address: str
    message: str


def path(mailing: str, number: int) -> Path:
    """Where a chunk is, once it is made.

    Args:
        mailing: the mailing's name.
        number: which chunk, from 0.
    """
    return recipients.directory() / mailing / f"{number:06}"


def missing(mailing: str) -> list[int]:
    """The numbers of the chunks that are not made."""
    return [number for number in range(recipients.chunks()) if not path(mailing, number).exists()]


def make(mailing: str, number: int) -> int:
    """Make a chunk, if it is not made.

    Args:
        mailing: the mailing's name.
        number: which chunk, from 0.

    Returns:
        How many messages have been made.
    """
    final = path(mailing, number)
    if final.exists():
        return 0
    people = recipients.chunk(number)
    final.parent.mkdir(exist_ok=True)
    part = final.with_suffix(f".{os.getpid()}.part")  # nobody else writes there, however late this run may go on
    with part.open("w") as file:
        for each in people:
            file.write(json.dumps([each.id, each.email, letter(mailing, each)]) + "\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(final)
    return len(people)


def read(mailing: str, number: int) -> Iterator[Entry]:
    """What is in a chunk, one message after the other.

    Args:
        mailing: the mailing's name.
        number: which chunk, from 0.
    """
    with path(mailing, number).open() as file:
        for line in file:
            yield Entry(*json.loads(line))
