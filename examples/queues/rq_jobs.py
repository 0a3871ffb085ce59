"""RQ: a job that one worker runs at a time, and that is not skipped when its first worker is killed.

$ pip install rq
$ rq worker --url $REDIS_URL --with-scheduler --maintenance-interval 5 --worker-ttl 30
>>> import redis, rq.decorators, rq_jobs
>>> queue = rq.Queue(connection=redis.Redis.from_url(os.environ["REDIS_URL"]))
>>> retry = rq.Retry(max=10, interval=60) if "TIMEOUT" in os.environ else rq.Retry(max=3)
>>> queue.enqueue(rq_jobs.report, day, retry=retry)
"""

from reports import make_report

from only_one import only_one


@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
