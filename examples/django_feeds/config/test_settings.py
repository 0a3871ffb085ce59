"""For tests: `python manage.py test --settings config.test_settings`; no server is needed."""

from .settings import *  # noqa: F403

CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
CELERY_BROKER_URL = "memory://"
CELERY_ONLY_ONE_ACTIVE = False
