"""The settings of the project around `django_jobs.py`."""

import os

SECRET_KEY = "not a secret"  # noqa: S105
INSTALLED_APPS = ["django_tasks", "django_tasks_db"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]}}
DATABASES["default"]["OPTIONS"] = {"timeout": 30, "transaction_mode": "IMMEDIATE"}  # type: ignore[assignment]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
USE_TZ = True
