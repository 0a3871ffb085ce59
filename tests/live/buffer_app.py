"""Tasks of which one runs and one waits, and a worker whose processes kill themselves when they are told to.

A task's process looks at its start whether there is a time at which it is to die, anywhere between the begin of the
delivery and its end: in the lock, in the run, while it is put back, or when it is released.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import redis
from celery import Celery
from celery.signals import task_postrun, task_prerun

from only_one import buffer_one, configure, only_one
from tests.live.brokers import countdown_of
from tests.live.workers import note, use_broker, wait_at

LEASE = 600
"""No expiry explains within a test that a key is free."""

app = Celery("buffered", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.task_acks_late = app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 4

_lock = threading.Lock()
_running: str | None = None

if "LIVE_URL" in os.environ:  # in a worker
    app.conf.result_backend = os.environ["LIVE_URL"]
    use_broker(app)
    configure(redis=os.environ["LIVE_URL"], prefix=os.environ["LIVE_PREFIX"])

    def die(task_id: str, words: tuple[object, ...]) -> None:
        """Kill this process, if it is still at that delivery."""
        with _lock:
            if _running == task_id:
                note("killed", *words, os.getpid())
                os.kill(os.getpid(), signal.SIGKILL)

    @task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
    def begin(task_id: str, args: list[Any], **_: Any) -> None:
        """Have the process killed in the middle of this delivery, if that is what is to happen to it."""
        global _running  # noqa: PLW0603 - one task at a time
        with redis.Redis.from_url(os.environ["LIVE_URL"]) as client:
            delay = client.lpop(f"kills:{task_id}")
        with _lock:
            _running = task_id
        if delay:
            timer = threading.Timer(float(delay), die, (task_id, tuple(args[:2])))
            timer.daemon = True
            timer.start()

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def end(args: list[Any], **_: Any) -> None:
        """Write down that a delivery has been seen to: run, put back or dropped."""
        global _running  # noqa: PLW0603 - one task at a time
        with _lock:
            _running = None
        note("seen", *args[:2])


@app.task  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE, when_busy=buffer_one(countdown=0.2))
def gated(key: str, number: int) -> int:
    """Runs until its gate is opened."""
    note("begin", key, number, os.getpid())
    try:
        wait_at(f"gate-{key}")
        return number
    finally:
        note("end", key, number, os.getpid())


@app.task(bind=True, max_retries=None)  # type: ignore[untyped-decorator]
@only_one("{key}", lease=LEASE, when_busy=buffer_one(countdown=0.5))
def timed(self: Any, key: str, number: int, seconds: float, retries: list[float]) -> int:
    """Runs for a while, and some times wants to be run again after another while."""
    note("begin", key, number, os.getpid())
    time.sleep(seconds)
    attempt = self.request.retries
    # Before the exception is raised: whoever runs next may begin before a `finally` is through.
    note("end" if attempt == len(retries) else "retry", key, number, os.getpid())
    if attempt < len(retries):
        raise self.retry(countdown=countdown_of(retries[attempt]))
    return number
