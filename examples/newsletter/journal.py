"""What the SMTP server has accepted: a file per chunk, with a byte for each recipient.

A byte is written over another: that is done or not done, needs no room on the disk that might not be there when the
message has been accepted already, and is safe from a kill of the process as soon as it is written.
What a loss of the whole machine may undo is what was written since the last `sync`.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

from .recipients import Mailing

WAITING, ACCEPTED, UNSUBSCRIBED, REFUSED, COMPLETE = b".", b"a", b"u", b"r", b"c"


def path(mailing: Mailing, number: int) -> Path:
    """Where a chunk's journal is.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
    """
    return mailing.folder / "journal" / f"{number:06}"


def count(mailing: Mailing, state: bytes = ACCEPTED) -> int:
    """How many recipients of a mailing are in a state.

    Args:
        mailing: the mailing.
        state: which one.
    """
    return sum(file.read_bytes()[: mailing.size].count(state) for file in path(mailing, 0).parent.glob("[0-9]*"))


class Journal(AbstractContextManager["Journal"]):
    """The journal of one chunk, for the one who sends it.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
    """

    def __init__(self, mailing: Mailing, number: int) -> None:
        self._size = mailing.size
        self._before = number * mailing.size + 1
        place = path(mailing, number)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            new = place.with_name(f"new-{place.name}")
            new.write_bytes(WAITING * (self._size + 1))
            new.replace(place)
        self._file = os.open(place, os.O_RDWR)

    @property
    def is_complete(self) -> bool:
        """Whether nobody waits any more."""
        return os.pread(self._file, 1, self._size) == COMPLETE

    def waits(self, recipient: int) -> bool:
        """Whether nothing has become of a recipient's message so far."""
        return os.pread(self._file, 1, recipient - self._before) == WAITING

    def note(self, recipient: int, state: bytes) -> None:
        """Write down what has become of a message.

        Args:
            recipient: whose it is.
            state: `ACCEPTED`, `UNSUBSCRIBED` or `REFUSED`.
        """
        os.pwrite(self._file, state, recipient - self._before)

    def sync(self) -> None:
        """Have on the disk what was written down."""
        os.fsync(self._file)

    def complete(self) -> None:
        """Write down that nobody waits any more."""
        os.pwrite(self._file, COMPLETE, self._size)
        self.sync()

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
