"""Tasks with each policy, and what may stand around them in a canvas."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import task_postrun, task_prerun

from only_one import AlreadyRunning, buffer_one, fail, only_one, retry, skip
from rigs.waiting import eventually
from tests.live.workers import note, use_broker

PAUSE = 2
"""Seconds between two deliveries of what waits, of which there are dozens, and the worker has others to see to."""

app = Celery("canvas", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True

if "LIVE_URL" in os.environ:  # in a worker, which is told nothing more: the keys are where the results are
    app.conf.result_backend = os.environ["LIVE_URL"]
    use_broker(app)
    app.conf.only_one_prefix = os.environ["LIVE_PREFIX"]

    @task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
    def begin(task: Any, task_id: str, **_: Any) -> None:
        """Begin a retry when the state of the attempt before it is stored.

        Celery looks for a success, and then stores that state, in two commands: a quick success would be lost.
        """
        if task.request.retries:
            eventually(lambda: app.AsyncResult(task_id).state != "PENDING")

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def end(kwargs: dict[str, Any], **_: Any) -> None:
        """Write down that a delivery has been seen to: run, put back or dropped."""
        note("seen", kwargs.get("key"))


def instead(error: AlreadyRunning) -> str:
    """A policy of the user's own."""
    return f"instead of {error.key.rpartition(':')[2]}"


POLICIES: dict[str, dict[str, Any]] = {
    "not given": {},
    "skip": {"when_busy": skip},
    "fail": {"when_busy": fail},
    "retry()": {"when_busy": retry(countdown=PAUSE)},
    "buffer_one()": {"when_busy": buffer_one(countdown=PAUSE)},
    "a callable": {"when_busy": instead},
}


def _make(policy: str) -> Any:
    """A task with this policy, which is run again with `then` for its key if there is one."""

    def work(self: Any, *, key: str, then: str | None = None) -> str:
        if then:
            raise self.retry(kwargs={"key": then}, countdown=0)
        return f"result of {key}"

    return app.task(only_one(work, key="{key}", **POLICIES[policy]), name=f"work, {policy}", bind=True)


WORK = {policy: _make(policy) for policy in POLICIES}


@app.task  # type: ignore[untyped-decorator]
def other() -> str:
    """Stands beside or before a covered task."""
    return "other"


@app.task  # type: ignore[untyped-decorator]
def after(value: Any) -> Any:
    """What comes next, and gives what it was given."""
    return value


@app.task  # type: ignore[untyped-decorator]
def failed(_request: Any, error: BaseException, _traceback: object, *, key: str) -> None:
    """What is called when a task fails."""
    note("failed", key, type(error).__name__)
