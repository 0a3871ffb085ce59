"""Where a mailing house keeps its files, and that only one is at work there."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

DIRECTORY = "NEWSLETTER_DIRECTORY"

LAST_WORKER = 10.0
"""Seconds that the worker of a house that was killed may take to be gone."""

_kept_open: list[BinaryIO] = []


class InUseError(Exception):
    """Another house is at work in the directory."""


def directory() -> Path:
    """The directory of the house that this process belongs to."""
    return Path(os.environ[DIRECTORY])


@contextmanager
def house(path: Path | None) -> Iterator[Path]:
    """Have a directory to oneself for the length of a `with` block.

    Each house has a Redis of its own, so two in one directory would not exclude each other.

    Args:
        path: the directory, which stays; None for a new one, which is removed.

    Yields:
        The directory.

    Raises:
        InUseError: another is at work there.
        OSError: it cannot be made.
    """
    if path is None:
        with tempfile.TemporaryDirectory(prefix="only_one-newsletter-", ignore_cleanup_errors=True) as new:
            yield Path(new)
        return
    path = path.resolve()
    path.mkdir(parents=True, exist_ok=True)
    with (path / "lock").open("wb") as lock, (path / "worker.lock").open("wb") as last:
        _lock(lock, path, limit=0)
        _lock(last, path, limit=LAST_WORKER)
        fcntl.flock(last, fcntl.LOCK_UN)
        yield path


def _lock(file: BinaryIO, path: Path, limit: float) -> None:
    deadline = time.monotonic() + limit
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                msg = f"another newsletter is at work in {path}"
                raise InUseError(msg) from None
            time.sleep(0.05)
        else:
            return


def stay(**_: object) -> None:
    """Be a worker of the house: as long as this process or a child of it lives, no other house moves in."""
    file = (directory() / "worker.lock").open("wb")
    fcntl.flock(file, fcntl.LOCK_SH)
    _kept_open.append(file)
