"""The task of Celery's cookbook."""

import httpx
from celery import shared_task
from django.utils import timezone

from only_one import only_one

from .models import Feed


@only_one("{name}-lock-{feed_url:md5}")
@shared_task  # type: ignore[untyped-decorator]
def import_feed(feed_url: str) -> int:
    """Fetch a feed and store it; returns its length."""
    document = httpx.get(feed_url, timeout=60).raise_for_status().text
    Feed.objects.filter(url=feed_url).update(document=document, imported_at=timezone.now())
    return len(document)
