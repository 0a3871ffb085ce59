"""Celery: tasks, settings, enqueue, requeue, redelivery and signals. The only package that imports Celery."""

from . import ended_tasks as ended_tasks  # connects the signal handlers, whichever module is imported
