"""The settings of the project; what concerns only_one comes last."""

import os
from pathlib import Path

SECRET_KEY = os.environ.get("SECRET_KEY", "only for development")
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
INSTALLED_APPS = ["feeds"]
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
ROOT_URLCONF = "feeds.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": Path(__file__).parents[1] / "db.sqlite3"},
}

REDIS = os.environ.get("REDIS", "redis://localhost:6379")
CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{REDIS}/0"}}
CELERY_BROKER_URL = f"{REDIS}/1"
CELERY_ONLY_ONE_REDIS = f"{REDIS}/2"  # not the cache's database: `cache.clear()` empties that

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "root": {"handlers": ["console"]},
    "loggers": {"only_one": {"level": "INFO"}},  # a line for each skip
}
