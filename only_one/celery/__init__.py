"""Celery: tasks, settings, enqueue, requeue, redelivery and signals. The only package that imports Celery."""

# These connect the signal handlers, whichever module is imported.
from . import ended_tasks as ended_tasks
from . import lazy_tasks as lazy_tasks
