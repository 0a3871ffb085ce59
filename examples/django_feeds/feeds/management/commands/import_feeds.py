"""The command `python manage.py import_feeds`."""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from ...models import Feed  # noqa: TID252
from ...tasks import import_feed  # noqa: TID252


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Queue the import of every feed that is not queued or running already."""

    def add_arguments(self, parser: CommandParser) -> None:
        """Feeds can be added."""
        parser.add_argument("url", nargs="*", help="a feed to add")

    def handle(self, *_: Any, **options: Any) -> None:
        """Say of each feed what has become of it."""
        for url in options["url"]:
            Feed.objects.get_or_create(url=url)
        for feed in Feed.objects.all():
            result = import_feed.delay(feed.url)
            state = "a duplicate of" if result.is_duplicate else "queued as"
            self.stdout.write(f"{feed.url}: {state} task {result.id}")
