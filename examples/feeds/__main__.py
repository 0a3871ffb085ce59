"""Run the feed importer for a while, kill one worker process in the middle of an import, and say what came of it."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.live import Live

from examples import running
from only_one.testing import Guarded, redis_server

from .app import FEEDS
from .journal import Rows, note, read
from .picture import Picture, has_recovered, problem

ROWS = [*FEEDS, "SingleTask"]

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


def main(duration: float, svg: str | None) -> None:
    """Run the demo.

    Args:
        duration: seconds from the first tick to the end, about.
        svg: the file to which to draw what happened, if any.

    Raises:
        OSError: something overlapped, nothing was skipped, or the killed feed was not imported again.
    """
    picture = Picture("Four feeds and a class-based task every second", duration)
    with TemporaryDirectory(prefix="only_one-demo-", ignore_cleanup_errors=True) as directory:
        try:
            _run(Path(directory), picture, duration)
        except OSError:
            for log in Path(directory).glob("*.log"):
                print(log.read_text()[-5000:], file=sys.stderr)
            raise
    if svg:
        console = Console(record=True, width=58, file=StringIO(), force_terminal=True)
        console.print(picture)
        console.save_svg(svg, title="make demo")
    print("\nok: no overlap, and the killed feed was imported again.")


def _run(directory: Path, picture: Picture, duration: float) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(redis_server())
        os.environ.update(
            DEMO_DIRECTORY=str(directory),
            ONLY_ONE_REDIS_URL=server.url,
            DEMO_BROKER_URL=server.url.removesuffix("0") + "1",
            TMPDIR=str(directory),  # a worker that is killed leaves something there
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        )
        (directory / "journal").touch()

        def start(name: str, command: list[str]) -> Guarded:
            log = stack.enter_context((directory / f"{name}.log").open("wb"))
            return stack.enter_context(Guarded(command, grace=1, cwd=directory, stdout=log, stderr=log))

        worker, beat = start("worker", WORKER), start("beat", BEAT)
        stack.enter_context(Live(picture, refresh_per_second=4))
        _direct(worker, beat, picture, duration)
    if reason := problem(picture.rows):
        raise OSError(reason)


def _direct(worker: Guarded, beat: Guarded, picture: Picture, duration: float) -> None:
    """Lead the worker and beat through their acts: begin, kill, recover, end."""

    def wait_for(what: str, condition: Callable[[Rows], bool]) -> None:
        def look() -> bool:
            picture.rows = read(ROWS)
            return condition(picture.rows)

        running.wait_for(what, look, worker, LIMIT)

    wait_for("a tick", lambda rows: any(row.ticks for row in rows.values()))
    begin = time.monotonic()
    wait_for("an import to kill", lambda rows: time.monotonic() > begin + duration / 5 and _kill_one(rows))
    wait_for("the killed feed to be imported again", has_recovered)
    wait_for("the end", lambda _: time.monotonic() > begin + duration - LAST)
    beat.send_signal(signal.SIGTERM)
    wait_for("the last runs", lambda rows: beat.poll() is not None and all(row.is_settled for row in rows.values()))


def _kill_one(rows: Rows) -> bool:
    """Kill the process of an import that is in the middle, if there is one."""
    for name in FEEDS:
        for run in rows[name].runs:
            if run.outcome == "running" and VICTIM_AGE[0] < time.monotonic() - run.start < VICTIM_AGE[1]:
                note("kill", name, run.pid)
                os.kill(run.pid, signal.SIGKILL)
                return True
    return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m examples.feeds", description=__doc__)
    parser.add_argument("--duration", type=float, default=20, metavar="SECONDS", help="about; default: %(default)s")
    parser.add_argument("--picture", metavar="PATH", help="draw what happened to this file, as SVG")
    options = parser.parse_args()
    sys.exit(running.exit_status(lambda: main(options.duration, options.picture)))
