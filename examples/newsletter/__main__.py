"""A mailing that is made in parallel chunks, and sent once, when all of them are made."""

import argparse
import fcntl
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.progress import Progress

from examples.breaking_off import exit_status
from only_one.errors import ConfigurationError
from only_one.testing import Guarded, redis_server

from . import making, recipients, sending
from .app import app, leave, start
from .smtp_server import smtp_server

MAILING = "spring"
ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "celery", "-A", "examples.newsletter.app", "worker", "--loglevel=INFO"]


class NewsletterError(Exception):
    """It is not sent, or not as it should be."""


def main(people: int, workers: int, directory: Path) -> int:
    """Run a mailing.

    Args:
        people: how many there are, unless there are some in the directory.
        workers: how many processes make chunks.
        directory: where everything is kept.

    Returns:
        The exit status: 0 if everybody has got it who has not unsubscribed, and nobody else.
    """
    os.environ["NEWSLETTER_DIRECTORY"] = str(directory)
    try:
        with _alone_in(directory) as lock, ExitStack() as stack:
            recipients.have_people(people)
            redis = stack.enter_context(redis_server())
            smtp, _ = stack.enter_context(smtp_server(directory / "accepted"))
            app.conf.update(broker_url=redis.url, result_backend=redis.url)
            stack.callback(leave)
            os.environ.update(NEWSLETTER_BROKER_URL=redis.url, NEWSLETTER_SMTP=smtp)
            log = stack.enter_context((directory / "worker.log").open("ab"))
            command = [*WORKER, f"--concurrency={workers}", "--without-gossip", "--without-mingle"]
            worker = stack.enter_context(Guarded(command, cwd=ROOT, stdout=log, stderr=log, pass_fds=[lock]))
            _follow(start(MAILING), worker)
            print(f"memory of the worker's largest process: {_peak(worker):.1f} MB")
        _check(directory / "accepted")
    except (NewsletterError, ConfigurationError, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _alone_in(directory: Path) -> Iterator[int]:
    """Have a directory to oneself: each newsletter has a Redis of its own, so two there would not see each other.

    Yields:
        The lock's file; who inherits it, as the worker does, keeps the directory until he is gone.
    """
    with (directory / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            msg = f"another newsletter is at work in {directory}"
            raise NewsletterError(msg) from None
        yield lock.fileno()


def _follow(result: Any, worker: Guarded) -> None:
    """Show the progress until there is a result."""
    chunks, last = recipients.chunks(), recipients.last_id()
    with Progress() as progress:
        made = progress.add_task("chunks made", total=chunks)
        sent = progress.add_task("mails sent ", total=last - len(recipients.unsubscribed(1, last)), start=False)
        while True:
            is_over = result.ready()
            missing = len(making.missing(MAILING))
            if not missing:
                progress.start_task(sent)
            progress.update(made, completed=chunks - missing)
            progress.update(sent, completed=sum(each.count(sending.ACCEPTED) for each in sending.journals(MAILING)))
            if is_over:
                break
            if (status := worker.poll()) is not None:
                msg = f"the worker ended early, with status {status}; with --directory the next start goes on"
                raise NewsletterError(msg)
            time.sleep(0.25)
    if result.failed():
        msg = f"{result.result}; with --directory the next start makes and sends what is missing"
        raise NewsletterError(msg)


def _peak(worker: Guarded) -> float:
    """The memory that the largest process of a worker has needed so far, in MB; 0 where there is no Linux to tell."""
    peaks = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            if os.getpgid(int(status.parent.name)) == worker.pid:
                peaks += map(int, re.findall(r"^VmHWM:\s+(\d+)", status.read_text(), re.MULTILINE))
    return max(peaks) / 1000


def _check(accepted: Path) -> None:
    """Say what has come of it, by the SMTP server's own list.

    Raises:
        NewsletterError: it is not what should have come of it.
    """
    mails = bytearray(recipients.last_id() + 1)  # of each person
    with accepted.open() as addresses:
        for address in addresses:
            mails[int(re.findall(r"\d+", address)[0])] += 1
    gone = recipients.unsubscribed(1, len(mails))
    wrong = sum(mails[each] for each in gone)
    without = sum(not mails[each] and each not in gone for each in range(1, len(mails)))
    twice = sum(number - 1 for number in mails if number)
    print(f"the SMTP server has accepted {sum(mails)} mails: {twice} twice, {wrong} for who has unsubscribed")
    if wrong or without:
        msg = f"{without} have not got it, and {wrong} have got it who have unsubscribed"
        raise NewsletterError(msg)


def _command_line() -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.newsletter", description=__doc__)
    parser.add_argument("--recipients", type=int, default=5000, help="how many people (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="keep everything there, to go on later (default: nowhere)")
    options = parser.parse_args()

    def run() -> int:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as new:
            directory = options.directory or Path(new)
            directory.mkdir(parents=True, exist_ok=True)
            return main(options.recipients, options.workers, directory.resolve())

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(_command_line())
