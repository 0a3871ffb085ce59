"""Django Tasks, with the database as queue: it redelivers no task that a killed worker had begun.

$ pip install django-tasks django-tasks-db redis
$ python -m django db_worker --interval 0.5
>>> import django
>>> django.setup()
>>> from django.core.management import call_command
>>> call_command("migrate", verbosity=0)
>>> from django_jobs import report
>>> report.enqueue(day)
"""

from django_tasks import task
from reports import make_report

from only_one import only_one


@task()
@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
