"""Programs beside a test or a benchmark, of which a file has what they print: Celery's workers, and others."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
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

    def send_to_all(self, number: int) -> None:
        """Send a signal to it and its children, all at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill_all(self) -> None:
        """End it and its children by SIGKILL, and wait for it."""
        self.send_to_all(signal.SIGKILL)
        self.close()


class Programs(AbstractContextManager["Programs"]):
    """Programs by name, which are killed and started again, and end with the block.

    Attributes:
        running: those that were started.

    Args:
        commands: each program and its arguments.
        folder: for what they print.
        popen: as for `Guarded`.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], folder: Path, **popen: Any) -> None:
        self.running: dict[str, Logged] = {}
        self._commands, self._folder, self._popen = commands, folder, popen

    def start(self, *names: str, words: str = READY) -> None:
        """Start some, in place of those that there were, and wait until they have printed these words."""
        self.close(*names)
        for name in names:
            self.running[name] = Logged(self._commands[name], self._folder / f"log of {name}", **self._popen)
        for name in names:
            self.running[name].wait_until_ready(words)

    def crash(self, name: str) -> None:
        """End one and its children by SIGKILL, and start it again."""
        self.running[name].kill_all()
        self.start(name)

    def close(self, *names: str) -> None:
        """End those of them that there are."""
        for name in self.running.keys() & {*names}:
            self.running[name].close()

    def __exit__(self, *_: object) -> None:
        self.close(*self.running)
