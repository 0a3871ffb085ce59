"""How long a queued task may wait, and keeps its key: until it expires, else for the setting ``queue_timeout``."""

from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware

from only_one.option_values import LONGEST


def longest_wait(app: Celery, queue_timeout: float, expires: Any, eta: Any) -> float:
    """Seconds for which a task that is queued now may wait: so long it keeps its key.

    Args:
        app: the task's app.
        queue_timeout: seconds for a task that does not expire, from when it may begin.
        expires: when the worker no longer begins it: seconds from now, a time or its ISO 8601 text; None for never.
        eta: when it may begin: seconds from now, or a time; None for at once.

    Returns:
        The seconds, at most ten years, also if it expires in the year 9999; 0 or fewer for a task that has expired.
    """
    if expires is not None:
        return min(_seconds_until(app, expires), LONGEST)
    return min(queue_timeout + max(0.0, _seconds_until(app, eta or 0)), LONGEST)


def _seconds_until(app: Celery, when: Any) -> float:
    if not isinstance(when, str) and not hasattr(when, "isoformat"):
        return float(when)
    time: Any = maybe_iso8601(when if isinstance(when, str) else when.isoformat())
    # By timestamps: the difference of two times of one zone leaves out that its clocks change.
    return float(maybe_make_aware(time).timestamp() - app.now().timestamp())
