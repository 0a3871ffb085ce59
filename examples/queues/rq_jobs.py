"""RQ: a job that one worker runs at a time, and that is not skipped when its first worker is killed."""

from reports import make_report

from only_one import only_one


@only_one("report:{day}")
def report(day: int) -> str:
    """Make the report of a day."""
    return make_report(day)
