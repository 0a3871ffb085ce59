"""Runs the feed importer for a while, kills one worker child in the middle of an import, and says what came of it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired

from rich.console import Console

from only_one.errors import ConfigurationError
from only_one.testing import Guarded, redis_server

from . import store
from .feed_server import FEEDS, feed_server
from .history import History, Row, Run
from .journal import Reader, note
from .patience import PATIENCE
from .summary import problem, report
from .timeline import View, view
from .timeline_svg import draw

SPARE = 2
"""Worker processes beyond one per feed: one for SingleTask, and one that is free to skip what comes meanwhile."""

MIN_WORKERS, MAX_WORKERS = SPARE + 2, SPARE + len(FEEDS)
MIN_DURATION, MAX_DURATION = 10.0, 28.0

START_LIMIT = 20.0 * PATIENCE
"""Seconds from the start of the worker and beat to the first tick."""

HARD_LIMIT = 29.0 * PATIENCE
"""Seconds from the first tick to the end, whatever happens."""

DRAIN = 4.5
"""Seconds at the end in which nothing new is started: the slowest import, and the worker's own shutdown."""

SHUTDOWN = 3.0
"""Seconds for the worker's warm shutdown."""

GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL for what is still there when the demo is broken off."""

VICTIM_AGE = (0.5, 1.3)
"""Seconds that an import has been running when its process is killed: in the middle, since they take longer."""

ROOT = Path(__file__).parents[2]
CELERY = [sys.executable, "-m", "celery", "-A", "examples.feeds.app"]
QUICK_START = ["--without-gossip", "--without-mingle", "--without-heartbeat"]


class DemoError(Exception):
    """Something that the demo needs is not there."""


@dataclass(frozen=True)
class Job:
    """What runs: the worker, beat and cron."""

    worker: Guarded
    beat: Guarded
    cron: Guarded


def main(duration: float, workers: int, picture: Path | None) -> int:
    """Run the demo.

    Args:
        duration: seconds from the first tick to the end, about.
        workers: how many worker processes.
        picture: where to write what happened as SVG, if anywhere.

    Returns:
        The exit status: 0 if nothing overlapped, something was skipped, and the killed feed was imported again.
    """
    console = Console()
    with _directory() as directory:
        try:
            history = _run(console, duration, workers)
            if picture:
                picture.write_text(draw(history), encoding="utf-8")
            reason = problem(history)
            print("", report(history, sum(count for _, count in store.count())), sep="\n")
        except (DemoError, ConfigurationError) as error:
            reason = str(error)
        if reason is None:
            print("ok: no overlap, and the killed feed was imported again.")
            shutil.rmtree(directory)
            return 0
        print(f"failed: {reason} (logs: {directory})", file=sys.stderr)
        return 1


@contextmanager
def _directory() -> Iterator[Path]:
    """A new directory for the demo's files, known to all its processes; removed if the demo is broken off."""
    directory = Path(tempfile.mkdtemp(prefix="only_one-demo-"))
    os.environ["DEMO_DIRECTORY"] = str(directory)
    try:
        yield directory
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _run(console: Console, duration: float, workers: int) -> History:
    feeds = workers - SPARE
    history = History([*(feed.name for feed in FEEDS[:feeds]), "SingleTask", "nightly-report"])
    title = f"import_feed for {feeds} feeds, SingleTask, and a report by cron; {workers} worker processes"
    with ExitStack() as stack:
        shown = stack.enter_context(view(console, title, duration))
        server = stack.enter_context(redis_server())
        urls = stack.enter_context(feed_server(feeds))
        os.environ.update(
            ONLY_ONE_REDIS_URL=server.url,
            DEMO_BROKER_URL=server.url.removesuffix("0") + "1",
            DEMO_FEEDS=" ".join(urls),
            TMPDIR=os.environ["DEMO_DIRECTORY"],  # a worker that is killed leaves something there
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        )
        job = Job(
            worker=stack.enter_context(_start("worker", [*CELERY, "worker", f"--concurrency={workers}", *QUICK_START])),
            beat=stack.enter_context(_start("beat", [*CELERY, "beat", "--schedule=schedule"])),
            cron=stack.enter_context(_start("cron", [sys.executable, "-m", "examples.feeds.cron"])),
        )
        Director(job, history, shown).direct(duration)
    return history


def _start(name: str, command: list[str]) -> Guarded:
    directory = Path(os.environ["DEMO_DIRECTORY"])
    with (directory / f"{name}.log").open("wb") as log:
        return Guarded(command, grace=GRACE, cwd=directory, stdout=log, stderr=log)


class Director:
    """Leads the job through its acts: begin, kill, recover, drain, end."""

    def __init__(self, job: Job, history: History, shown: View) -> None:
        self._job = job
        self._history = history
        self._view = shown
        self._reader = Reader()

    def direct(self, duration: float) -> None:
        """Show the job from its first tick to its end.

        Args:
            duration: seconds that this takes, about.

        Raises:
            DemoError: it did not begin, or the worker ended early.
        """
        if not self._follow(lambda: self._history.begin is not None, time.monotonic() + START_LIMIT):
            msg = f"no tick within {START_LIMIT:.0f} s"
            raise DemoError(msg)
        begin = self._history.begin or time.monotonic()
        limit = begin + HARD_LIMIT - SHUTDOWN
        self._wait(begin + duration / 5)
        self._follow(self._kill_one, limit - DRAIN)
        self._wait(begin + duration - DRAIN)
        self._follow(self._is_recovering, limit - DRAIN)
        self._drain(limit)

    def _wait(self, moment: float) -> None:
        self._follow(lambda: False, moment)

    def _follow(self, until: Callable[[], bool], limit: float) -> bool:
        """Show what happens until a condition holds (True), or until a moment of the journal's clock (False)."""
        while not self._show_news(until):
            if time.monotonic() > limit:
                return False
            if (status := self._job.worker.poll()) is not None:
                msg = f"the worker ended early, with status {status if status >= 0 else 128 - status}"
                raise DemoError(msg)
            time.sleep(0.1)
        return True

    def _show_news(self, until: Callable[[], bool]) -> bool:
        lines = self._reader.read()
        for line in lines:
            self._history.add(line)
        self._view.show(self._history, lines, time.monotonic())
        return until()

    def _kill_one(self) -> bool:
        """Kill the process of an import that is in the middle, if there is one."""
        now = time.monotonic()
        for row, run in self._imports():
            if VICTIM_AGE[0] < now - run.start < VICTIM_AGE[1]:
                note("kill", row.name, run.pid)
                os.kill(run.pid, signal.SIGKILL)
                return True
        return False

    def _imports(self) -> Iterator[tuple[Row, Run]]:
        for feed in FEEDS:
            if row := self._history.rows.get(feed.name):
                yield from ((row, run) for run in row.running)

    def _is_recovering(self) -> bool:
        row = self._history.killed_row
        return bool(row and row.next_after_kill)

    def _drain(self, limit: float) -> None:
        """No more ticks; let what is queued and what runs come to its end, then the worker."""
        for clock in (self._job.beat, self._job.cron):
            clock.send_signal(signal.SIGTERM)
        self._follow(self._is_quiet, limit)
        self._job.worker.send_signal(signal.SIGTERM)  # to the main process alone: a warm shutdown
        with suppress(TimeoutExpired):
            self._job.worker.wait(SHUTDOWN)
        self._show_news(lambda: True)

    def _is_quiet(self) -> bool:
        ended = all(clock.poll() is not None for clock in (self._job.beat, self._job.cron))
        return ended and self._history.is_settled
