"""How long a queued task may wait, and so keeps its key."""

from __future__ import annotations

from datetime import date, datetime, timedelta

import pytest

from only_one.celery.queue_timeout import longest_wait
from tests.celery.deliveries import Keys, Queue, unique

pytestmark = pytest.mark.usefixtures("redis")


@pytest.mark.parametrize("begun", ["2026-11-01T05:45+00:00", "2027-03-14T06:45+00:00"], ids=["autumn", "spring"])
def test_a_time_beyond_a_change_of_the_clocks(queue: Queue, monkeypatch: pytest.MonkeyPatch, begun: str) -> None:
    """A time without a zone is UTC's, for Celery."""
    moment = datetime.fromisoformat(begun)
    queue.app.conf.timezone = "America/New_York"
    monkeypatch.setattr(queue.app, "now", lambda: moment.astimezone(queue.app.timezone))
    assert longest_wait(queue.app, 600, (moment + timedelta(minutes=30)).replace(tzinfo=None), None) == 1800


def test_how_long_a_task_is_waited_for_to_the_second_and_until_a_date(queue: Queue, keys: Keys) -> None:
    for expires, until, seconds in ((None, None, 600), (None, 60, 660), (None, -60, 600), (0, 60, 0), (60, None, 60)):
        assert longest_wait(queue.app, 600, expires, until) == seconds
    unique(queue.app, "k").apply_async(eta=date.today() + timedelta(days=10))  # noqa: DTZ011 - in the app's zone
    assert 8 * 86_400 < keys.left() < 12 * 86_400
