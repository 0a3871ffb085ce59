"""A task whose process is killed in the moment after it has given its key back, and before its result is stored."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.sweeps import soon
from only_one import Released, configure, only_one, subscribe
from tests.live.crew import Witness, note

VISIBILITY = 2.0
LONG = 5.0
"""Seconds of the first run, in which the broker delivers the message again."""

app = Celery("lost_result", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {**soon(VISIBILITY), "unacked_mutex_expire": 3}
app.conf.worker_prefetch_multiplier = 1


def die_after_the_first(event: Any) -> None:
    """Be killed when the first run has released its key."""
    if isinstance(event, Released) and event.seconds > LONG:
        note("killed", os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)


if "LIVE_URL" in os.environ:  # in a worker
    app.conf.broker_url = app.conf.result_backend = os.environ["LIVE_URL"]
    configure(redis=os.environ["LIVE_URL"], prefix=os.environ["LIVE_PREFIX"])
    subscribe(die_after_the_first)


@app.task(bind=True, acks_late=True, reject_on_worker_lost=True)  # type: ignore[untyped-decorator]
@only_one("work", timeout=600)
def work(self: Any) -> str:
    """Take long in the first run, and no time in the second."""
    note("begin", self.request.id)
    is_first = len(Witness(Path(os.environ["LIVE_WITNESS"])).lines("begin")) == 1
    if is_first:
        time.sleep(LONG)
    note("end", self.request.id)
    return "first" if is_first else "second"


@app.task  # type: ignore[untyped-decorator]
def follow(before: str) -> str:
    """What comes after it in a chain.

    Args:
        before: what it has returned.

    Returns:
        The same, followed.
    """
    return f"{before}, followed"
