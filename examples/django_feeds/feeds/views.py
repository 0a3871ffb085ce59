"""The views."""

import httpx
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_POST

from only_one import AlreadyRunning, fail, only_one

from .models import Feed
from .tasks import import_feed


@require_POST  # type: ignore[untyped-decorator]
def queue_import(_request: HttpRequest, feed_id: int) -> HttpResponse:
    """Queue the import of a feed; of a double click, the second part finds the task of the first."""
    feed = get_object_or_404(Feed, pk=feed_id)
    result = import_feed.delay(feed.url)
    return JsonResponse({"task_id": result.id, "is_duplicate": result.is_duplicate}, status=202)


async def preview(_request: HttpRequest, feed_id: int) -> HttpResponse:
    """Show a feed as it is now, without Celery."""
    feed = await Feed.objects.aget(pk=feed_id)
    try:
        return HttpResponse(await fetch(feed.url), content_type="text/plain")
    except AlreadyRunning:
        return HttpResponse("is being fetched already", status=409)


@only_one("preview-{feed_url:md5}", when_busy=fail)
async def fetch(feed_url: str) -> str:
    """Fetch a feed; one request at a time per feed, whichever process serves it."""
    async with httpx.AsyncClient(timeout=60) as client:
        return (await client.get(feed_url)).raise_for_status().text
