"""A mailing that is made in parallel chunks, and sent once, when all of them are made."""

import argparse
import fcntl
import os
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from examples import running
from only_one.testing import Guarded, redis_server

from . import making, recipients, sending
from .app import app, leave, start
from .smtp_server import smtp_server

MAILING = "spring"
ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "celery", "-A", "examples.newsletter.app", "worker", "--loglevel=INFO"]
WORKER += ["--concurrency=2", "--without-gossip", "--without-mingle"]


def main(people: int, directory: Path) -> None:
    """Run a mailing.

    Args:
        people: how many there are, unless there are some in the directory.
        directory: where everything is kept.

    Raises:
        OSError: somebody has not got it, or somebody has got it who has unsubscribed.
    """
    os.environ["NEWSLETTER_DIRECTORY"] = str(directory)
    with ExitStack() as stack:
        # Each newsletter has a Redis of its own, so two in one directory would not see each other: one waits.
        lock = stack.enter_context((directory / "lock").open("wb"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        recipients.have_people(people)
        redis = stack.enter_context(redis_server())
        smtp, _ = stack.enter_context(smtp_server(directory / "accepted"))
        app.conf.update(broker_url=redis.url, result_backend=redis.url)
        stack.callback(leave)
        os.environ.update(NEWSLETTER_BROKER_URL=redis.url, NEWSLETTER_SMTP=smtp)
        log = stack.enter_context((directory / "worker.log").open("ab"))
        # The worker inherits the lock, and keeps the directory until it is gone.
        with Guarded(WORKER, cwd=ROOT, stdout=log, stderr=log, pass_fds=[lock.fileno()]) as worker:
            _follow(start(MAILING), worker)
    _check(directory / "accepted")


def _follow(result: Any, worker: Guarded) -> None:
    """Show the progress until there is a result.

    Raises:
        OSError: it failed; with `--directory` the next start makes and sends what is missing.
    """
    chunks, last = recipients.chunks(), recipients.last_id()
    with Progress() as progress:
        made = progress.add_task("chunks made", total=chunks)
        sent = progress.add_task("mails sent ", total=last - len(recipients.unsubscribed(1, last)))

        def is_over() -> bool:
            is_ready: bool = result.ready()  # asked first, so that the progress that is shown last is the whole
            progress.update(made, completed=chunks - len(making.missing(MAILING)))
            progress.update(sent, completed=sum(each.count(sending.ACCEPTED) for each in sending.journals(MAILING)))
            return is_ready

        running.wait_for("the mailing", is_over, worker)
    if result.failed():
        msg = f"{result.result}; with --directory the next start makes and sends what is missing"
        raise OSError(msg)


def _check(accepted: Path) -> None:
    """Say what has come of it, by the SMTP server's own list.

    Raises:
        OSError: it is not what should have come of it.
    """
    got = Counter(accepted.read_text().split())
    wanted = {each.email for number in range(recipients.chunks()) for each in recipients.chunk(number)}
    print(f"the SMTP server has accepted {got.total()} mails: {got.total() - len(got)} twice")
    if got.keys() != wanted:
        msg = f"{len(wanted - got.keys())} have not got it, and {len(got.keys() - wanted)} have got it who unsubscribed"
        raise OSError(msg)


def _command_line() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.newsletter", description=__doc__)
    parser.add_argument("--recipients", type=int, default=5000, help="how many people (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="keep everything there, to go on later (default: nowhere)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as new:
        directory = options.directory or Path(new)
        directory.mkdir(parents=True, exist_ok=True)
        main(options.recipients, directory.resolve())


if __name__ == "__main__":
    sys.exit(running.exit_status(_command_line))
