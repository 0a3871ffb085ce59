"""A mailing whose workers are killed while it is made and while it is sent, and which is started again each time.

    python -m benchmarks.newsletter_kills [--kills N] [--recipients N] [--chunk N] [--seed N] [--log FOLDER]

The points are random: so many chunks that are made, and so many mails that the SMTP server has accepted.
At each a child that is at work, or the whole worker, is killed by SIGKILL, and the mailing is started again, though
its messages may come back, too, for the broker delivers those of a killed worker again after 3 s.
While there is no worker somebody unsubscribes whose message is made, and not sent.
What counts is what the SMTP server has written down.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import kill, killpg
from pathlib import Path
from signal import SIGKILL

import redis
from rich.console import Console

from examples.newsletter import journal, places, recipients, sending, spool
from examples.newsletter.app import app, leave, send, start
from examples.newsletter.house import QUICK_START, WORKER
from examples.newsletter.people import EXCLUDE, INCLUDE, crowd
from examples.newsletter.smtp_server import smtp_server
from examples.newsletter.summary import ACCEPTED
from only_one import configure
from only_one.inspection import holder_of
from only_one.testing import Guarded, redis_server

NAME = "killed"
WORKERS_KILLED = 0.25
"""How many of the kills are of the whole worker; the first one of each phase is."""

LIMIT = 60.0
"""Seconds in which something has to come next."""

CHUNK_SECONDS = 0.1
"""How long after a chunk is made a kill may be, so that it comes at any point of the next one."""

ROOT = Path(__file__).parents[1]
QUEUE = "celery"


def is_living(pid: int) -> bool:
    """Whether there is such a process."""
    with suppress(ProcessLookupError):
        kill(pid, 0)
        return True
    return False


class Accepted:
    """What the SMTP server has written down, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.seen: Counter[str] = Counter()
        self._path, self._at = path, 0

    def read(self) -> int:
        """Read what is new; returns how many there are."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                whole = file.read().rpartition(b"\n")[0]
            self._at += len(whole) + 1 if whole else 0
            self.seen.update(whole.decode().split())
        return sum(self.seen.values())


class Worker:
    """A worker with two children, started again when it was killed."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self._environment, self._log = environment, log
        self.process: Guarded | None = None

    def start(self) -> None:
        """Start it; the messages that wait are taken as soon as it is ready."""
        command = [*WORKER, "--concurrency=2", *QUICK_START]
        with self._log.open("ab") as log:
            self.process = Guarded(command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        """Kill it and its children."""
        if self.process is not None:
            killpg(self.process.pid, SIGKILL)
            self.process.wait(LIMIT)
            self.process.close()

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.close()


class Trial:
    """The mailing, what is killed, and what was found."""

    def __init__(self, url: str, worker: Worker, seed: int, kills: int) -> None:
        self.mailing = recipients.mailing(NAME)
        self.accepted = Accepted(places.directory() / ACCEPTED)
        self.chosen = {
            each.email: each.id for n in range(self.mailing.chunks) for each in recipients.chunk(self.mailing, n)
        }
        self.kills: Counter[tuple[str, str]] = Counter()
        self.late: list[str] = []
        self.early = False
        self._url, self._worker, self._random, self._number = url, worker, random.Random(seed), kills
        self._console = Console(stderr=True, highlight=False)

    def run(self) -> None:
        """Kill in both phases, and let the mailing come to its end."""
        self._worker.start()
        self._start()
        for number, point in enumerate(self._points(self.mailing.chunks)):
            self._wait(lambda: self._made() >= int(point))  # noqa: B023 - it is called here
            time.sleep(self._random.uniform(0, CHUNK_SECONDS))
            self._kill("making", self._maker, whole=number == 0)
        for number, point in enumerate(self._points(len(self.chosen))):
            self._wait(lambda: self.accepted.read() >= int(point))  # noqa: B023 - it is called here
            self._kill("sending", self._sender, whole=number == 0)
        with redis.Redis.from_url(self._url) as client:
            self._wait(lambda: self._is_sent() and not client.exists(QUEUE, "unacked"))
        self.accepted.read()

    def _points(self, end: float) -> list[float]:
        return sorted(self._random.uniform(0, end) for _ in range(self._number))

    def _start(self) -> None:
        start(NAME)

    def _made(self) -> int:
        return self.mailing.chunks - len(spool.missing(self.mailing))

    def _is_sent(self) -> bool:
        files = [journal.path(self.mailing, number) for number in range(self.mailing.chunks)]
        return all(file.exists() and file.read_bytes().endswith(journal.COMPLETE) for file in files)

    def _wait(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.accepted.read() and self._made() < self.mailing.chunks:
                self.early = True
            if time.monotonic() > deadline:
                msg = f"{self._made()} chunks are made and {self.accepted.read()} mails sent, and nothing comes next"
                raise TimeoutError(msg)
            time.sleep(0.001)

    def _maker(self) -> int | None:
        """A process that makes a chunk."""
        parts = [int(file.suffixes[-2][1:]) for file in spool.path(self.mailing, 0).parent.glob("*.part")]
        living = [pid for pid in parts if is_living(pid)]
        return self._random.choice(living) if living else None

    def _sender(self) -> int | None:
        """The process that sends."""
        holder = holder_of(send, NAME)
        return holder.pid if holder else None

    def _kill(self, phase: str, find: Callable[[], int | None], *, whole: bool) -> None:
        """Kill a child that is at work, or the worker, and start the mailing again."""
        pid = None if whole or self._random.random() < WORKERS_KILLED else self._found(find)
        if pid is None:
            self._worker.kill()
            self._unsubscribe_one()
            self._worker.start()
        else:
            with suppress(ProcessLookupError):
                kill(pid, SIGKILL)
        what = "the worker" if pid is None else "a child"
        self.kills[phase, what] += 1
        self._console.print(f"{phase}: {self._made()} chunks, {self.accepted.read()} mails; killed {what}")
        self._start()

    def _found(self, find: Callable[[], int | None]) -> int | None:
        """A process that is at work, if one is so within a second."""
        deadline = time.monotonic() + 1
        while (pid := find()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return pid

    def _unsubscribe_one(self) -> None:
        """Take somebody off the list who has not got the mail, while nobody sends."""
        self.accepted.read()
        waiting = sorted(self.chosen.keys() - self.accepted.seen.keys() - {*self.late})
        if self._made() == self.mailing.chunks and len(waiting) > 1:
            self.late.append(self._random.choice(waiting[1:]))
            recipients.unsubscribe([self.chosen[self.late[-1]]])

    def report(self) -> bool:
        """Print what was found; returns whether all is as it should be."""
        seen = self.accepted.seen
        expected = self.chosen.keys() - {*self.late}
        missing = expected - seen.keys()
        wrong = [email for email in seen if email not in expected]
        again = sum(times - 1 for times in seen.values())
        hit = sum(times for (phase, _), times in self.kills.items() if phase == "sending")
        for (phase, what), times in sorted(self.kills.items()):
            print(f"killed while {phase}: {what}, {times} times")
        print(f"chosen {len(self.chosen)}, unsubscribed when their message was made: {len(self.late)}")
        print(f"  accepted by the SMTP server:      {sum(seen.values()):6}")
        print(f"  sent twice, in {hit:3} kills:          {again:6}")
        print(f"  not sent:                         {len(missing):6}")
        print(f"  sent to others:                   {len(wrong):6}")
        print(f"  sent before all was made:         {int(self.early):6}")
        return not missing and not wrong and not self.early and again <= hit


@contextmanager
def trial(directory: Path, seed: int, kills: int, people: int, chunk: int) -> Iterator[Trial]:
    """Have all that a trial needs for the length of a `with` block."""
    os.environ[places.DIRECTORY] = str(directory)
    recipients.add(crowd(people))
    recipients.register(NAME, INCLUDE, EXCLUDE, chunk)
    with redis_server() as server, smtp_server(directory / ACCEPTED) as smtp:
        app.conf.update(broker_url=server.url, result_backend=server.url)
        configure(redis=server.url)
        worker = Worker(
            {
                **os.environ,
                "NEWSLETTER_BROKER_URL": server.url,
                "NEWSLETTER_VISIBILITY": "3",
                sending.SMTP: smtp.address,
            },
            directory / "worker.log",
        )
        try:
            yield Trial(server.url, worker, seed, kills)
        finally:
            worker.close()
            leave()


def main() -> None:
    """Kill, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in each phase (20)")
    parser.add_argument("--recipients", type=int, default=2000, help="(2000)")
    parser.add_argument("--chunk", type=int, default=100, help="ids per chunk (100)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of all that is random")
    parser.add_argument("--log", type=Path, help="where to put what the workers have said, and all files")
    options = parser.parse_args()
    for name in ("kills", "recipients", "chunk"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: at least 1")
    print(f"{options.kills} kills in each phase, seed {options.seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with trial(Path(folder), options.seed, options.kills, options.recipients, options.chunk) as tried:
                try:
                    tried.run()
                finally:
                    is_well = tried.report()
        finally:
            if options.log:
                shutil.copytree(folder, options.log, dirs_exist_ok=True)
    print(f"{time.monotonic() - began:.0f} s: {'all is well' if is_well else 'NOT WELL'}")
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
