"""Celery: tasks, settings, enqueue, requeue, redelivery and signals. The only package that imports Celery."""
