"""Runs a mailing: its database, a Redis, an SMTP server, a worker; and says what has come of it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.exceptions import ChordError

from only_one.errors import ConfigurationError
from only_one.testing import Guarded, redis_server

from . import places, recipients, sending
from .app import app, leave, make_all, start
from .people import EXCLUDE, INCLUDE, crowd
from .progress import Follower, follow
from .recipients import Mailing
from .smtp_server import smtp_server
from .summary import ACCEPTED, summary

NAME = "spring"
RECIPIENTS = 2000
"""How many are written to in a new directory, if nothing else is said."""

GRACE = 5.0
"""Seconds from SIGTERM to SIGKILL for what is left when it is broken off."""

ROOT = Path(__file__).parents[2]
WORKER = [sys.executable, "-m", "celery", "-A", "examples.newsletter.app", "worker", "--loglevel=INFO"]
QUICK_START = ["--without-gossip", "--without-mingle", "--without-heartbeat"]


class HouseError(Exception):
    """Something that the house needs is not there, or is not as it is said to be."""


@dataclass(frozen=True)
class Options:
    """What is asked for.

    Attributes:
        recipients: how many; None for those who are there.
        workers: how many processes make chunks.
        chunk: how many ids a chunk spans.
        directory: where everything is kept; None for a new directory, which is removed.
        make_only: make, and do not send.
        json: print a line for a machine.
    """

    recipients: int | None
    workers: int
    chunk: int
    directory: Path | None
    make_only: bool
    json: bool


def main(options: Options) -> int:
    """Run a mailing.

    Args:
        options: what is asked for.

    Returns:
        The exit status: 0 if everybody who was chosen has got it, and nobody else.
    """
    try:
        with places.house(options.directory) as directory:
            os.environ[places.DIRECTORY] = str(directory)
            return _run(options)
    except (HouseError, places.InUseError, ConfigurationError, ChildProcessError, OSError, ValueError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1


def _run(options: Options) -> int:
    mailing, expected = _prepare(options)
    with _staff(options.workers) as worker, follow(mailing, 0 if options.make_only else expected) as follower:
        begin = time.monotonic()
        _wait((make_all if options.make_only else start)(NAME), follower, worker)
        end = time.monotonic()
        found = summary(mailing, end - begin)
    made = follower.made_at or end
    print(found.line() if options.json else found.text(made - begin, end - made), flush=True)
    if options.make_only or not found.problem:
        return 0
    print(f"failed: {found.problem}", file=sys.stderr)
    return 1


def _prepare(options: Options) -> tuple[Mailing, int]:
    """Have the people and the mailing; returns it with the number of its recipients."""
    if recipients.is_empty():  # also where filling it was broken off
        recipients.add(crowd(options.recipients or RECIPIENTS))
    mailing = recipients.register(NAME, INCLUDE, EXCLUDE, options.chunk)
    expected = recipients.count(mailing)
    if options.recipients not in {None, expected}:
        msg = f"the mailing in {places.directory()} is to {expected} recipients, not to {options.recipients}"
        raise HouseError(msg)
    return mailing, expected


@contextmanager
def _staff(workers: int) -> Iterator[Guarded]:
    """Have the servers and the worker for the length of a `with` block."""
    directory = places.directory()
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        smtp = stack.enter_context(smtp_server(directory / ACCEPTED))
        app.conf.update(broker_url=redis.url, result_backend=redis.url)
        stack.callback(leave)
        log = stack.enter_context((directory / "worker.log").open("ab"))
        environment = {
            **os.environ,
            "NEWSLETTER_BROKER_URL": redis.url,
            sending.SMTP: smtp.address,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        command = [*WORKER, f"--concurrency={workers}", *QUICK_START]
        yield stack.enter_context(Guarded(command, grace=GRACE, cwd=directory, env=environment, stdout=log, stderr=log))


def _wait(result: Any, follower: Follower, worker: Guarded) -> None:
    """Show the progress until there is a result."""
    while not result.ready():
        follower.look()
        if (status := worker.poll()) is not None:
            status = status if status >= 0 else 128 - status
            msg = f"the worker ended early, with status {status}; what is done is kept with --directory"
            raise HouseError(msg)
        time.sleep(0.1)
    errors = [each.result for each in getattr(result, "results", [result]) if each.failed()]
    if not errors:
        return
    said = (
        "nothing was sent, as not all chunks could be made" if isinstance(errors[0], ChordError) else "it is not done"
    )
    msg = f"{said}; with --directory the next start makes and sends what is missing: {errors[0]}"
    raise HouseError(msg)
