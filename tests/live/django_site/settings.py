"""What a Django project has in its settings, with what is for only_one in Celery's namespace."""

from __future__ import annotations

import os

SECRET_KEY = "only for tests"  # noqa: S105
INSTALLED_APPS = ["tests.live.django_site.orders"]
USE_TZ = True

CELERY_BROKER_URL = os.environ["LIVE_URL"]
CELERY_RESULT_BACKEND = os.environ["LIVE_URL"]
CELERY_TASK_DEFAULT_QUEUE = "django"
CELERY_ONLY_ONE_PREFIX = "django:"
ONLY_ONE_PREFIX = "out of the namespace:"
CELERY_ONLY_ONE_WHEN_BUSY = "only_one.fail"
CELERY_ONLY_ONE_QUEUE_TIMEOUT = 600
