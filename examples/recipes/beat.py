"""Tasks that take longer than their beat schedules leave them."""

# mypy: disable-error-code=untyped-decorator

import time

from celery import Celery

from only_one import fail, only_one

app = Celery("shop", broker="redis://localhost:6379/0")
app.conf.beat_schedule = {
    "stock": {"task": "count_stock", "schedule": 1.0},
    "prices": {"task": "import_prices", "schedule": 1.0},
    "reminders": {"task": "send_reminders", "schedule": 1.0},
}


@app.task(name="count_stock")
@only_one("{name}")  # below: beat sends every tick, and the worker skips
def count_stock() -> None:
    """Take three ticks."""
    time.sleep(3)


@only_one("{name}")  # above: beat sends no tick while one is queued or running
@app.task(name="import_prices")
def import_prices() -> None:
    """Take three ticks."""
    time.sleep(3)


@only_one("{name}", when_busy=fail)  # above: and beat logs an error for each tick that it does not send
@app.task(name="send_reminders")
def send_reminders() -> None:
    """Take three ticks."""
    time.sleep(3)
