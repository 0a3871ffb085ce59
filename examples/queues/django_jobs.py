"""Django Tasks, with the database as queue: it redelivers no task that a killed worker had begun."""

from django_tasks import task
from reports import make_report

from only_one import only_one


@task()
@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
