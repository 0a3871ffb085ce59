"""Tasks that are in the queue, or running, once at a time: `celery -A examples.singleton.tasks worker`."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

import os

from celery import Celery

from only_one import fail, only_one

from . import work

URL = os.environ.get("SINGLETON_URL", "redis://localhost:6379/1")
EXPIRY = 3.0

app = Celery("singleton", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True


@only_one
@app.task
def render(*pages: int, **style: str) -> str:
    """Without a key it is the task's name and all of its arguments.

    Returns:
        What was rendered.
    """
    work.take(0.5)
    return f"{len(pages)} pages, {style}"


@only_one
@app.task
def rebuild(index: str) -> str:
    """Nothing has to be cleared when a worker that runs it is killed, and a run that fails is no case of its own.

    Args:
        index: which one.

    Returns:
        What was rebuilt.

    Raises:
        ValueError: for an index without a name.
    """
    work.take(0.5)
    if not index:
        msg = "which index?"
        raise ValueError(msg)
    return f"index of {index}"


@only_one("{name}:{user}")
@app.task
def send_digest(user: str, reason: int | None = None) -> str:
    """One for each user, whatever the reason.

    Args:
        user: who gets it.
        reason: why, which is no part of the key.

    Returns:
        What was sent.
    """
    work.take(0.5)
    return f"digest for {user}, because of {reason}"


@only_one("{name}:{user}", when_busy=fail)
@app.task
def export(user: str) -> str:
    """Whoever asks for a second one is told, by an `AlreadyRunning`.

    Args:
        user: whose data it is.

    Returns:
        What was exported.
    """
    work.take(0.5)
    return f"data of {user}"


@only_one(timeout=EXPIRY)
@app.task
def poll() -> str:
    """A run that takes longer than three seconds no longer keeps others out; one that waits in the queue does.

    Returns:
        What was polled.
    """
    work.take(2 * EXPIRY)
    return "polled"


@only_one("{name}:{user}", at_least=60)
@app.task
def remind(user: str) -> str:
    """One a minute for each user, though it takes no time.

    Args:
        user: who is reminded.

    Returns:
        Who was.
    """
    return f"{user} was reminded"
