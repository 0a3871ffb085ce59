"""Huey: it redelivers no job that a killed worker had begun; the next one that is enqueued does the work.

$ pip install huey redis
$ huey_consumer huey_jobs.huey
>>> from huey_jobs import report
>>> report(day)
"""

import os

from huey import RedisHuey
from reports import make_report

from only_one import only_one

huey = RedisHuey(url=os.environ["REDIS_URL"])


@huey.task()
@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
