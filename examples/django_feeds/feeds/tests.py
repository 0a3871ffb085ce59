"""Tests with Django's own runner: `python manage.py test --settings config.test_settings`."""
# ruff: noqa: PT009 - Django's tests are unittest's

from unittest.mock import patch

import httpx
from django.test import TestCase

from only_one import configure
from only_one.testing import redis_server

from .models import Feed
from .tasks import import_feed

URL = "https://example.com/feed.xml"


class ImportTests(TestCase):  # type: ignore[misc]  # Django has no types
    """The task and its view."""

    def setUp(self) -> None:
        """Store a feed."""
        self.feed = Feed.objects.create(url=URL)

    def test_the_task(self) -> None:
        """It is called as a function; no server is asked."""
        answer = httpx.Response(200, text="<feed/>", request=httpx.Request("GET", URL))
        with patch("httpx.get", return_value=answer):
            import_feed(URL)
        self.feed.refresh_from_db()
        self.assertEqual(self.feed.document, "<feed/>")

    def test_the_view(self) -> None:
        """Nothing is a duplicate while the locking is switched off."""
        for _ in range(2):
            answer = self.client.post(f"/feeds/{self.feed.pk}/import/")
            self.assertFalse(answer.json()["is_duplicate"])

    def test_a_duplicate(self) -> None:
        """This one wants to see a duplicate, so it starts a server, and switches the locking on."""
        with redis_server() as server, configure(redis=server.url, active=True):
            first, second = (self.client.post(f"/feeds/{self.feed.pk}/import/").json() for _ in range(2))
        self.assertEqual(second, {"task_id": first["task_id"], "is_duplicate": True})
