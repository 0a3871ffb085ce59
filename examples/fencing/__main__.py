"""Pause one writer past its lease, run another, let the first go on, and see what is in the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from only_one.testing import redis_server

from .store import Store
from .writer import LEASE


class Writer:
    """A writer in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def signal(self, number: int) -> None:
        """Pause it (SIGSTOP) or let it go on (SIGCONT)."""
        self._process.send_signal(number)

    def read(self) -> str:
        """The next line that it prints."""
        if self._process.stdout is None:
            return ""
        return self._process.stdout.readline().strip()

    def finish(self) -> str:
        """Let it write; returns what has become of that."""
        return self._process.communicate("\n", timeout=120)[0].strip()


@contextmanager
def writer(url: str, database: Path, text: str) -> Iterator[Writer]:
    """Start a writer of `text`, which ends with the `with` block."""
    command = [sys.executable, "-m", "examples.fencing.writer", str(database), text]
    environment = {**os.environ, "ONLY_ONE_REDIS_URL": url}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Writer(process)
        finally:
            process.kill()


def main() -> int:
    """Show it; returns the exit status."""
    with TemporaryDirectory() as folder, redis_server() as server, redis.Redis.from_url(server.url) as client:
        database = Path(folder) / "reports.sqlite"
        with writer(server.url, database, "old") as first:
            first.read()
            print("a writer has begun, and is paused")
            first.signal(signal.SIGSTOP)
            while client.exists("only_one:report"):
                time.sleep(LEASE / 20)
            print("its lease is over")
            with writer(server.url, database, "new") as second:
                second.read()
                print(f"another writes: {second.finish()}")
            first.signal(signal.SIGCONT)
            print(f"the first one goes on, and writes: {first.finish()}")
        text = Store(database).read("report")
        print(f"in the store: {text}")
        return 0 if text == "new" else 1


if __name__ == "__main__":
    sys.exit(main())
