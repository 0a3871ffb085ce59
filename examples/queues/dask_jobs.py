"""Dask: the worker tells which task runs; the scheduler gives it to another worker when that one is gone."""

from distributed import get_worker
from reports import make_report

from only_one import only_one


@only_one("report:{day}", work_id=lambda day: get_worker().get_current_task())  # noqa: ARG005
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
