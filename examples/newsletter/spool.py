"""The messages of a chunk, in a file that is there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .recipients import Mailing


@dataclass(frozen=True)
class Entry:
    """A message that is ready to be sent.

    Attributes:
        id: its recipient's.
        address: where it goes.
        message: as it is sent.
    """

    id: int
    address: str
    message: bytes


def path(mailing: Mailing, number: int) -> Path:
    """Where a chunk is, once it is made.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
    """
    return mailing.folder / "chunks" / f"{number:06}"


def part(mailing: Mailing, number: int) -> Path:
    """Where this process writes a chunk; nobody else writes there, however late a run may go on."""
    return path(mailing, number).with_suffix(f".{os.getpid()}.part")


def missing(mailing: Mailing) -> list[int]:
    """The numbers of the chunks that are not made."""
    return [number for number in range(mailing.chunks) if not path(mailing, number).exists()]


def write(mailing: Mailing, number: int, entries: Iterable[Entry]) -> int:
    """Write a chunk, and put it in place when all of it is on the disk.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
        entries: what is in it.

    Returns:
        How many messages there are.
    """
    final, own, written = path(mailing, number), part(mailing, number), 0
    final.parent.mkdir(parents=True, exist_ok=True)
    with own.open("wb") as file:
        for entry in entries:
            file.write(b"%d %d %s\n" % (entry.id, len(entry.message), entry.address.encode()))
            file.write(entry.message)
            written += 1
        file.flush()
        os.fsync(file.fileno())
    own.replace(final)
    _sync(final.parent)
    for left in final.parent.glob(f"{final.name}.*.part"):  # by runs that were killed
        left.unlink(missing_ok=True)
    return written


def _sync(folder: Path) -> None:
    """Have the names in a folder on the disk, too."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read(mailing: Mailing, number: int) -> Iterator[Entry]:
    """What is in a chunk, one after the other.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
    """
    with path(mailing, number).open("rb") as file:
        for recipient, length, address in _heads(file):
            yield Entry(recipient, address, file.read(length))


def count(mailing: Mailing, number: int) -> int:
    """How many messages a chunk has.

    Args:
        mailing: the mailing.
        number: which chunk, from 0.
    """
    with path(mailing, number).open("rb") as file:
        return sum(file.seek(length, os.SEEK_CUR) > 0 for _, length, _ in _heads(file))


def _heads(file: BinaryIO) -> Iterator[tuple[int, int, str]]:
    while head := file.readline():
        recipient, length, address = head.split()
        yield int(recipient), int(length), address.decode()
