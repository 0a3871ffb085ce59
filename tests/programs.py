"""Examples as programs: started as a user starts them, broken off, and what is left of them then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rigs.waiting import LIMIT, eventually

ROOT = Path(__file__).parents[1]


class Program:
    """A program that runs, with a worker of Celery's below it.

    Args:
        process: its process.
        log: the file that has what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def text(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def started(self) -> dict[int, str]:
        """The command lines of what it has started by the time when the worker is there, which is waited for."""
        assert eventually(lambda: any(map(is_worker, descendants(self.process.pid).values())), pause=0.2), self.text
        return descendants(self.process.pid)

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait(2 * LIMIT)

    def is_gone_after(self, number: int) -> int:
        """Send it a signal, and see that nothing outlives it; returns the exit status."""
        started = self.started()
        self.process.send_signal(number)
        status = self.wait()
        assert eventually(lambda: not processes().keys() & started.keys(), pause=0.1)
        assert "Traceback" not in self.text
        return status


@contextmanager
def program(module: str, folder: Path, *arguments: object, **environment: str) -> Iterator[Program]:
    """Run an example for the length of a `with` block.

    Args:
        module: its module.
        folder: for its files, and for what it prints.
        arguments: its command line.
        environment: further variables of its environment.
    """
    log = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}.log")
    command = [sys.executable, "-m", module, *map(str, arguments)]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "TMPDIR": str(folder), **environment}
    with (
        log.open("wb") as output,
        subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True) as process,
    ):
        try:
            yield Program(process, log)
        finally:
            process.kill()


def processes() -> dict[int, tuple[int, str]]:
    """The living processes: the parent and the command line of each."""
    command = ["ps", "-axww", "-o", "pid=,ppid=,stat=,command="]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
    return {int(pid): (int(ppid), command) for pid, ppid, stat, command in rows if stat[0] != "Z"}


def descendants(ancestor: int) -> dict[int, str]:
    """The command lines of all processes that a process has started, directly or not."""
    everybody, found = processes(), {ancestor}
    for _ in everybody:
        found |= {pid for pid, (parent, _) in everybody.items() if parent in found}
    return {pid: command for pid, (_, command) in everybody.items() if pid in found - {ancestor}}


def is_worker(command: str) -> bool:
    """Whether it is a process of a worker."""
    return "celery" in command and " worker" in command
