"""Celery: tasks, settings, enqueue, requeue, redelivery and signals. The only package that imports Celery."""

from . import ended_tasks as ended_tasks  # which listens to signals, whatever is imported from here
