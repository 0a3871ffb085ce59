"""The examples of celery-singleton's README, with only_one: `celery -A examples.singleton worker`.

Each task is in the queue, or running, once at a time.
"""

# mypy: disable-error-code=untyped-decorator

import os
import time

from celery import Celery

from only_one import fail, only_one

URL = os.environ.get("SINGLETON_URL", "redis://localhost:6379/1")

app = Celery("singleton", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True


@only_one
@app.task
def render(*pages: int, **style: str) -> str:
    """Without a key: one for each set of arguments."""
    return f"{len(pages)} pages, {style}"


@only_one
@app.task
def rebuild(index: str) -> str:
    """Nothing must be cleared when a worker that runs it is killed, or when a run fails."""
    if not index:
        msg = "which index?"
        raise ValueError(msg)
    return f"index of {index}"


@only_one("{name}:{user}")
@app.task
def send_digest(user: str, reason: int | None = None) -> str:
    """One for each user: the reason is no part of the key."""
    return f"digest for {user}, because of {reason}"


@only_one("{name}:{user}", when_busy=fail)
@app.task
def export(user: str) -> str:
    """Whoever asks for a second one gets an `AlreadyRunning`."""
    return f"data of {user}"


@only_one(timeout=3)
@app.task
def poll() -> str:
    """A run that takes longer than three seconds no longer keeps others out; one that waits in the queue does."""
    time.sleep(6)
    return "polled"


@only_one("{name}:{user}", at_least=60)
@app.task
def remind(user: str) -> str:
    """One a minute for each user, though it takes no time."""
    return f"{user} was reminded"
