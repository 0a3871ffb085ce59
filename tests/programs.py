"""Examples as programs: started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rigs.waiting import LIMIT

ROOT = Path(__file__).parents[1]


class Program:
    """A program that runs.

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

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return self.process.wait(2 * LIMIT)


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
