"""A Django project, as its users write it."""

from .celery import app as app
