"""Queue each task twice, start a worker, and see what comes of it."""

from __future__ import annotations

import gc
import os
import sys
import time
from subprocess import DEVNULL
from typing import Any

import redis

from only_one import AlreadyRunning, KeyTemplateError, only_one
from only_one.testing import Guarded, redis_server

from . import tasks

LIMIT = 120.0
WORKER = [sys.executable, "-m", "celery", "-A", "examples.singleton.tasks", "worker", "-c", "4", "-l", "ERROR"]


def say(what: str, one: Any, other: Any) -> None:
    """Print whether two calls have the same result."""
    print(f"{what}: {'one task' if one == other else 'two tasks'}")


def queue() -> Any:
    """Queue duplicates while there is no worker; returns the first result."""
    first = tasks.render.delay(1, 2, 3, paper="A4")
    say("the same arguments", first, tasks.render.delay(1, 2, 3, paper="A4"))
    say("other arguments", first, tasks.render.delay(4, 5, 6))
    digest = tasks.send_digest.delay("bob", reason=99)
    say("the same user, another reason", digest, tasks.send_digest.delay(user="bob", reason=100))
    say("another user", digest, tasks.send_digest.delay("ann"))
    task = tasks.export.delay("bob")
    try:
        tasks.export.delay("bob")
    except AlreadyRunning as error:
        say("refused, and told of the first", task, tasks.export.AsyncResult(error.task_id))
    try:
        only_one("{name}:{user_id}")(tasks.app.task(lambda username: username, name="misspelt"))
    except KeyTemplateError as error:
        print(f"refused when decorating: {error}")
    return first


def watch(client: Any, first: Any) -> None:
    """See what comes after a run, and beside one that takes longer than it may."""
    print(f"the first is done: {first.get(timeout=LIMIT)}")
    again = tasks.render.delay(1, 2, 3, paper="A4")
    say("the same arguments, after that", first, again)
    reminder = tasks.remind.delay("bob")
    reminder.get(timeout=LIMIT)
    say("a reminder within a minute of the last", reminder, tasks.remind.delay("bob"))
    slow = tasks.poll.delay()
    say("while it may run", slow, tasks.poll.delay())
    while any(client.scan_iter("only_one:*poll*")):
        time.sleep(tasks.EXPIRY / 20)
    other = tasks.poll.delay()
    say("when it has run for longer than that", slow, other)
    for each in (again, slow, other):
        each.get(timeout=LIMIT)


def main() -> int:
    """Show it; returns the exit status."""
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        tasks.app.conf.update(broker_url=server.url, result_backend=server.url)
        first = queue()
        with Guarded(WORKER, env={**os.environ, "SINGLETON_URL": server.url}, stdout=DEVNULL):
            watch(client, first)
        del first
        gc.collect()  # a result that is let go of later would look for the server, which is gone then
        tasks.app.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
