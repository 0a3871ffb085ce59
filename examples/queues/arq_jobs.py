"""arq: the job's context, its first argument, tells only_one which job runs.

$ pip install arq
$ arq arq_jobs.WorkerSettings
>>> import arq, arq_jobs
>>> pool = run(arq.create_pool(arq_jobs.WorkerSettings.redis_settings))
>>> run(pool.enqueue_job("report", day))
"""

import os
from typing import Any

from arq.connections import RedisSettings
from reports import make_report_async

from only_one import only_one


@only_one("report:{day}")
async def report(ctx: dict[str, Any], day: int) -> str:  # noqa: ARG001 - arq gives it
    """Make the report of a day."""
    return await make_report_async(day)


class WorkerSettings:
    """Started with `arq arq_jobs.WorkerSettings`."""

    functions = (report,)
    job_timeout = 15
    redis_settings = RedisSettings.from_dsn(os.environ["REDIS_URL"])
