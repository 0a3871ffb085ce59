"""Pause one writer past its lease, run another, let the first go on, and see what is in the store."""

import os
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

import redis

from only_one.testing import redis_server

from .store import read


def begin_writing(database: Path, text: str) -> Popen[str]:
    """Start a writer of `text`, and wait until it has begun."""
    command = [sys.executable, "-m", "examples.fencing.writer", str(database), text]
    writer = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
    if writer.stdout is not None:
        writer.stdout.readline()
    return writer


def finish(writer: Popen[str]) -> str:
    """Let it write; returns what has become of that."""
    return writer.communicate("\n", timeout=120)[0].strip()


def main() -> int:
    """Show it; returns the exit status."""
    with TemporaryDirectory() as folder, redis_server() as server, redis.Redis.from_url(server.url) as client:
        os.environ["ONLY_ONE_REDIS_URL"] = server.url
        database = Path(folder) / "reports.sqlite"
        first = begin_writing(database, "old")
        print("a writer has begun, and is paused")
        first.send_signal(signal.SIGSTOP)
        while client.exists("only_one:report"):
            time.sleep(0.1)
        print("its lease is over")
        print(f"another writes: {finish(begin_writing(database, 'new'))}")
        first.send_signal(signal.SIGCONT)
        print(f"the first one goes on, and writes: {finish(first)}")
        text = read(database, "report")
        print(f"in the store: {text}")
        return 0 if text == "new" else 1


if __name__ == "__main__":
    sys.exit(main())
