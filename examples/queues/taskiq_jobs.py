"""taskiq: the task asks for its context, and `work_id` takes the id of the message from there.

$ pip install taskiq taskiq-redis
$ taskiq worker --workers 1 taskiq_jobs:broker
>>> from taskiq_jobs import broker, report
>>> run(broker.startup())
>>> run(report.kiq(day))
"""

import os
from typing import Annotated

from reports import make_report_async
from taskiq import Context, TaskiqDepends
from taskiq_redis import RedisStreamBroker

from only_one import only_one

IDLE = int(os.environ.get("IDLE_SECONDS", "600")) * 1000
broker = RedisStreamBroker(os.environ["REDIS_URL"], idle_timeout=IDLE, unacknowledged_lock_timeout=5)


@broker.task
@only_one("report:{day}", work_id=lambda day, context: context.message.task_id)  # noqa: ARG005
async def report(day: int, context: Annotated[Context, TaskiqDepends()]) -> str:  # noqa: ARG001
    """Make the report of a day."""
    return await make_report_async(day)
