"""An app whose configuration says it for all of its tasks: `celery -A examples.singleton.configured worker`."""

# mypy: disable-error-code=untyped-decorator

from __future__ import annotations

from celery import Celery
from celery.result import AsyncResult

from only_one import AlreadyRunning, only_one

from . import work
from .tasks import URL

app = Celery("configured", broker=URL, backend=URL)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_default_queue="configured",
    only_one_redis=URL,
    only_one_prefix="mine:",
    only_one_when_busy="only_one.fail",
    only_one_timeout=600,
    only_one_queue_timeout=900,
)


@only_one("{name}:{shop}")
@app.task
def count_stock(shop: str) -> str:
    """What the configuration says.

    Args:
        shop: where it is counted.

    Returns:
        What was counted.
    """
    work.take(0.5)
    return f"stock of {shop}"


def one_that_is_there(error: AlreadyRunning) -> AsyncResult:
    """What is given where no policy is, for a task of an app that has one."""
    return app.AsyncResult(error.task_id)


@only_one("{name}:{shop}", timeout=60, when_busy=one_that_is_there)
@app.task
def order_more(shop: str) -> str:
    """What the decorator says, which wins.

    Args:
        shop: who orders.

    Returns:
        What was ordered.
    """
    work.take(0.5)
    return f"order of {shop}"
