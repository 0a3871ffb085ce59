"""How long a task may wait in its queue before others no longer wait for it."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware


def waits_for(app: Celery, queue_timeout: float, expires: Any, until: Any) -> float:
    """Seconds for which a task that is queued now keeps its key.

    Args:
        app: the task's app.
        queue_timeout: seconds for a task that does not expire, from when it may begin.
        expires: when the worker no longer begins it, as Celery takes it; or None.
        until: when it may begin, in seconds or as a time; None for at once.

    Returns:
        The seconds; none are left, or less, for a task that has expired.
    """
    if expires is not None:
        return _seconds_until(app, expires)
    return queue_timeout + max(0.0, _seconds_until(app, until or 0))


def _seconds_until(app: Celery, moment: Any) -> float:
    if isinstance(moment, date) and not isinstance(moment, datetime):
        moment = datetime.combine(moment, datetime.min.time())
    if not isinstance(moment, (str, datetime)):
        return float(moment)
    time: Any = maybe_iso8601(moment)
    return float((maybe_make_aware(time, app.timezone) - app.now()).total_seconds())
