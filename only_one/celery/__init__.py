"""What only_one knows of Celery: the only place that imports it."""
