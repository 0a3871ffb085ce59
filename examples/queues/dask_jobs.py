"""Dask: the worker tells which task runs; the scheduler gives it to another worker when that one is gone.

$ pip install distributed redis
$ dask worker tcp://127.0.0.1:$PORT --no-nanny --nthreads 1 --no-dashboard
>>> import dask, dask_jobs, distributed
>>> port = int(os.environ["PORT"])
>>> cluster = distributed.LocalCluster(n_workers=0, scheduler_port=port, dashboard_address=None)
>>> client, jobs = distributed.Client(cluster), []
>>> jobs.append(client.submit(dask_jobs.report, day, pure=False))
"""

from distributed import get_worker
from reports import make_report

from only_one import only_one


@only_one("report:{day}", work_id=lambda day: get_worker().get_current_task())  # noqa: ARG005
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
