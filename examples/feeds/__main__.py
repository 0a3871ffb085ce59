"""Run the feed importer for a while, kill one worker process in the middle of an import, and say what came of it."""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.live import Live

from examples.breaking_off import exit_status
from only_one.errors import ConfigurationError
from only_one.testing import Guarded, redis_server

from .feed_server import FEEDS, feed_server
from .journal import note, read
from .picture import Picture, has_recovered, problem

ROWS = [*FEEDS, "SingleTask", "nightly-report"]

LIMIT = 120.0
"""Seconds to wait for anything."""

LAST = 6.0
"""Seconds that the last runs may take when the schedule has ended, about."""

VICTIM_AGE = (0.5, 1.3)
"""Seconds that an import has been running when its process is killed: in the middle, because they take longer."""

ROOT = Path(__file__).parents[2]
CELERY = [sys.executable, "-m", "celery", "-A", "examples.feeds.app"]
WORKER = [*CELERY, "worker", "--concurrency=6", "--without-gossip", "--without-mingle", "--without-heartbeat"]
BEAT = [*CELERY, "beat", "--schedule=schedule"]

# Three machines whose clocks agree; at SIGTERM, it waits for the reports that run.
CRON = f"""
trap 'wait; exit' TERM
while :; do
    for machine in 1 2 3; do {sys.executable} -m examples.feeds.nightly_report & done
    sleep 4
done
"""


class Demo:
    """Leads the worker, beat and cron through their acts: begin, kill, recover, end.

    Args:
        worker: the worker.
        clocks: beat and cron.
        picture: where what happens is shown.
    """

    def __init__(self, worker: Guarded, clocks: Sequence[Guarded], picture: Picture) -> None:
        self._worker, self._clocks, self._picture = worker, clocks, picture

    def direct(self, duration: float) -> None:
        """Show the job from its first tick to its end.

        Args:
            duration: seconds that this takes, about.

        Raises:
            TimeoutError: something did not happen.
            ChildProcessError: the worker ended early.
        """
        self._wait_for("a tick", lambda: any(row.ticks for row in self._picture.rows.values()))
        begin = time.monotonic()
        self._wait_for("an import to kill", lambda: time.monotonic() > begin + duration / 5 and self._kill_one())
        self._wait_for("the killed feed to be imported again", lambda: has_recovered(self._picture.rows))
        self._wait_for("the end", lambda: time.monotonic() > begin + duration - LAST)
        for clock in self._clocks:
            clock.send_signal(signal.SIGTERM)
        self._wait_for("the last ticks", lambda: all(clock.poll() is not None for clock in self._clocks))
        self._wait_for("the last runs", lambda: all(row.is_settled for row in self._picture.rows.values()))

    def _wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Show what happens until a condition holds."""
        deadline = time.monotonic() + LIMIT
        self._picture.rows = read(ROWS)
        while not condition():
            if (status := self._worker.poll()) is not None:
                msg = f"the worker ended early, with status {status}"
                raise ChildProcessError(msg)
            if time.monotonic() > deadline:
                msg = f"waited {LIMIT:.0f} s for {what}"
                raise TimeoutError(msg)
            time.sleep(0.1)
            self._picture.rows = read(ROWS)

    def _kill_one(self) -> bool:
        """Kill the process of an import that is in the middle, if there is one."""
        for name in FEEDS:
            for run in self._picture.rows[name].runs:
                if run.outcome == "running" and VICTIM_AGE[0] < time.monotonic() - run.start < VICTIM_AGE[1]:
                    note("kill", name, run.pid)
                    os.kill(run.pid, signal.SIGKILL)
                    return True
        return False


def main(duration: float, svg: str | None) -> int:
    """Run the demo.

    Args:
        duration: seconds from the first tick to the end, about.
        svg: the file to which to draw what happened, if any.

    Returns:
        The exit status: 0 if nothing overlapped, something was skipped, and the killed feed was imported again.
    """
    picture = Picture("Four feeds and a class-based task every second, a report on three machines", duration)
    directory = Path(tempfile.mkdtemp(prefix="only_one-demo-"))
    try:
        _run(directory, picture, duration)
        reason = problem(picture.rows)
    except (OSError, ConfigurationError) as error:
        reason = str(error)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    if reason:
        print(f"\nfailed: {reason} (logs: {directory})", file=sys.stderr)
        return 1
    if svg:
        console = Console(record=True, width=58, file=StringIO(), force_terminal=True)
        console.print(picture)
        console.save_svg(svg, title="make demo")
    print("\nok: no overlap, and the killed feed was imported again.")
    shutil.rmtree(directory)
    return 0


def _run(directory: Path, picture: Picture, duration: float) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        urls = stack.enter_context(feed_server())
        os.environ.update(
            DEMO_DIRECTORY=str(directory),
            ONLY_ONE_REDIS_URL=server.url,
            DEMO_BROKER_URL=server.url.removesuffix("0") + "1",
            DEMO_FEEDS=" ".join(urls),
            TMPDIR=str(directory),  # a worker that is killed leaves something there
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        )
        (directory / "journal").touch()

        def start(name: str, command: list[str]) -> Guarded:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            return stack.enter_context(Guarded(command, grace=1, cwd=directory, stdout=log, stderr=log))

        worker = start("worker", WORKER)
        clocks = [start("beat", BEAT), start("cron", ["sh", "-c", CRON])]
        stack.enter_context(Live(picture, refresh_per_second=4))
        Demo(worker, clocks, picture).direct(duration)


def _command_line() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.feeds", description=__doc__)
    parser.add_argument("--duration", type=float, default=20, metavar="SECONDS", help="about; default: %(default)s")
    parser.add_argument("--picture", metavar="PATH", help="draw what happened to this file, as SVG")
    options = parser.parse_args()
    return exit_status(lambda: main(options.duration, options.picture))


if __name__ == "__main__":
    sys.exit(_command_line())
