"""Celery: tasks, settings, enqueue, requeue, redelivery and signals. The only package that imports Celery."""

# These connect the signal handlers, whichever module is imported.
from . import async_tasks as async_tasks
from . import ended_tasks as ended_tasks
