"""APScheduler 3 in several processes, such as gunicorn's workers: one of them runs the job, once per tick.

$ pip install 'apscheduler<4' redis
$ python -c "import apscheduler_jobs, time; apscheduler_jobs.scheduler.start(); time.sleep(9999)"
>>> from apscheduler_jobs import scheduler
>>> pass  # the scheduler begins them
"""

from apscheduler.schedulers.background import BackgroundScheduler
from reports import make_report

from only_one import only_one

scheduler = BackgroundScheduler()


@scheduler.scheduled_job("cron", second="*/5")
@only_one("report", at_least=2.5)  # half of the time between two ticks
def report() -> str:
    """Make the report of today."""
    return make_report(1)
