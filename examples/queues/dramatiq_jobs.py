"""Dramatiq: the middleware CurrentMessage tells only_one which message runs.

$ pip install 'dramatiq[redis]'
$ dramatiq dramatiq_jobs --processes 1 --threads 2
>>> from dramatiq_jobs import report
>>> report.send(day)
"""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from reports import make_report

from only_one import only_one

broker = RedisBroker(url=os.environ["REDIS_URL"], heartbeat_timeout=10_000, maintenance_chance=100_000)
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


@dramatiq.actor
@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
