"""The Celery application: a task that makes a chunk, one that sends, and the chord of them.

```
celery -A examples.newsletter.app worker
```
"""

# mypy: disable-error-code=untyped-decorator

import os
import sqlite3

from celery import Celery, chord
from celery.result import AsyncResult

from only_one import LockLost, LockUnavailable, current_lock, only_one, retry

from . import making, recipients, sending

BROKER = os.environ.get("NEWSLETTER_BROKER_URL", "redis://localhost:6379/1")

TRANSIENT = (OSError, sqlite3.OperationalError, LockLost, LockUnavailable)
"""What may be better at the next attempt: disk, network, database, Redis."""

AGAIN = {
    "acks_late": True,
    "reject_on_worker_lost": True,
    "autoretry_for": TRANSIENT,
    "retry_backoff": True,
    "max_retries": int(os.environ.get("NEWSLETTER_RETRIES", "5")),
}

app = Celery("newsletter", broker=BROKER, backend=BROKER)
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_prefetch_multiplier = 1


@app.task(**AGAIN)
@only_one("{name}:{mailing}:{number}", when_busy=retry())
def make_chunk(mailing: str, number: int) -> int:
    """Make a chunk of a mailing, if it is not made.

    Args:
        mailing: the mailing's name.
        number: which chunk, from 0.

    Returns:
        How many messages have been made.
    """
    return making.make(mailing, number)


@app.task(**AGAIN)
@only_one("{name}:{mailing}")
def send(mailing: str) -> int:
    """Send a mailing, or what is left of it.

    Args:
        mailing: the mailing's name.

    Returns:
        How many messages the SMTP server has accepted from this run; None is given while another one sends.
    """
    return sending.deliver(mailing, current_lock().ensure_held)


def start(mailing: str) -> AsyncResult:
    """Start a mailing, or start it again: what is made is not made again, and what is sent is not sent again.

    Args:
        mailing: the mailing's name.

    Returns:
        The result of sending it.
    """
    return chord([make_chunk.si(mailing, number) for number in range(recipients.chunks())])(send.si(mailing))


def leave() -> None:
    """Let go of the Redis to which tasks were sent, before it is stopped.

    Celery unsubscribes from each result when that is collected, which may be as late as the interpreter's exit, and
    would look for the server for 20 s each time.
    """
    app.backend.result_consumer.stop()
    app.backend.result_consumer._pubsub = None  # noqa: SLF001 - Celery has no other way to say that it is over
    app.close()
