"""What is stored."""

from django.db import models


class Feed(models.Model):  # type: ignore[misc]  # Django has no types
    """A feed, and what it was when it was imported last."""

    url = models.URLField(unique=True)
    document = models.TextField(blank=True)
    imported_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return str(self.url)
