"""A writer that is paused past its lease, and a store that refuses its late write: `python -m examples.fencing`.

A lock cannot stop a process that does not know yet that it has lost it: only the store that is written to can.
Each run is given a number that is higher than that of every run before it (`current_lock().fence`), sends it with each
write, and the store refuses what is lower than the highest it has seen.
"""

import os
import signal
import sqlite3
import sys
import time
from contextlib import closing
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory

import redis

from only_one import current_lock, only_one
from only_one.testing import redis_server

SCHEMA = "CREATE TABLE IF NOT EXISTS report (name TEXT PRIMARY KEY, text TEXT NOT NULL, fence INTEGER NOT NULL)"

# Checked and written in one statement: between a SELECT and an UPDATE, another write could come.
UPSERT = """
INSERT INTO report (name, text, fence) VALUES (:name, :text, :fence)
ON CONFLICT (name) DO UPDATE SET text = excluded.text, fence = excluded.fence
WHERE excluded.fence >= report.fence
"""


def write(path: str, name: str, text: str, fence: int) -> str:
    """Store a report, unless a later run has done so already.

    Args:
        path: the store's file.
        name: the report's.
        text: what is in it.
        fence: `current_lock().fence` of the run that writes; a run may write several times.

    Returns:
        "written" or "refused".
    """
    with closing(sqlite3.connect(path, timeout=10)) as store, store:
        store.execute(SCHEMA)
        written = store.execute(UPSERT, {"name": name, "text": text, "fence": fence}).rowcount
    return "written" if written else "refused"


@only_one("report", lease=3)
def write_report(path: str, text: str) -> None:
    """Write the report once its text is known, and say what has become of it."""
    # Asked for before the work is begun: so whoever begins later has a higher one, however long this takes.
    fence = current_lock().fence
    print("begun", flush=True)
    sys.stdin.readline()  # here, a real one computes
    print(write(path, "report", text, fence), flush=True)


def begin_writing(path: str, text: str) -> Popen[str]:
    """Start a writer, a process of its own, and wait until it has begun."""
    writer = Popen([sys.executable, "-m", "examples.fencing", path, text], stdin=PIPE, stdout=PIPE, text=True)
    if writer.stdout is not None:
        writer.stdout.readline()
    return writer


def finish(writer: Popen[str]) -> str:
    """Let it write; returns what has become of that."""
    return writer.communicate("\n", timeout=120)[0].strip()


def main() -> None:
    """Pause one writer past its lease, run another, and let the first go on."""
    with TemporaryDirectory() as folder, redis_server() as server, redis.Redis.from_url(server.url) as client:
        os.environ["ONLY_ONE_REDIS_URL"] = server.url
        path = f"{folder}/reports.sqlite"
        first = begin_writing(path, "old")
        print("a writer has begun, and is paused")
        first.send_signal(signal.SIGSTOP)
        while client.exists("only_one:report"):
            time.sleep(0.1)
        print(f"another writes: {finish(begin_writing(path, 'new'))}")
        first.send_signal(signal.SIGCONT)
        print(f"the first one goes on, and writes: {finish(first)}")


if __name__ == "__main__":
    if writer_arguments := sys.argv[1:]:
        write_report(*writer_arguments)
    else:
        main()
