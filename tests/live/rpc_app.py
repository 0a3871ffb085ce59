"""A task whose results go to nobody but the process that has queued it."""

from __future__ import annotations

import os

from celery import Celery

from only_one import configure, only_one
from tests.live.workers import PREFIX, URL, use_broker, wait_at

app = Celery("rpc", set_as_current=False)
app.conf.broker_connection_retry_on_startup = True
app.conf.result_backend = "rpc://"

if URL in os.environ:  # in a worker
    use_broker(app)
    configure(redis=os.environ[URL], prefix=PREFIX)


@only_one("{gate}")
@app.task  # type: ignore[untyped-decorator]
def gated(gate: str) -> str:
    """Runs until its gate is opened."""
    wait_at(gate)
    return "done"
