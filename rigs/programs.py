"""Programs beside a test or a benchmark, of which a file has what they print: Celery's workers, and others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from only_one.testing import Guarded
from rigs.waiting import eventually

READY = " ready."
"""What a worker of Celery prints once it has started."""


def celery_worker(application: str, *options: str, pool: str = "prefork", size: int = 3) -> list[str]:
    """The command of a worker of so many processes, which asks no other worker for anything."""
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    command = [sys.executable, "-m", "celery", "-A", application, "worker", "-l", "INFO", *quiet]
    return [*command, "-P", pool, "-c", str(size), *options]


class Logged(Guarded):
    """A program that ends with the block, and what it has printed.

    Args:
        command: the program and its arguments.
        log: the file, to which it appends.
        popen: as for `Guarded`.
    """

    def __init__(self, command: Sequence[str], log: Path, **popen: Any) -> None:
        self._log = log
        with log.open("ab") as output:
            self._begin = output.tell()
            super().__init__(command, stdout=output, stderr=output, **popen)

    @property
    def text(self) -> str:
        """What it has printed since it was started."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def wait_until_ready(self, words: str = READY) -> None:
        """Wait until it has printed these words.

        Raises:
            TimeoutError: it has ended, or does not print them.
        """
        if not eventually(lambda: words in self.text or self.poll() is not None) or self.poll() is not None:
            raise TimeoutError(self.text[-2000:])
