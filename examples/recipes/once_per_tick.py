"""One report for each tick, although beat runs on several hosts."""

# mypy: disable-error-code=untyped-decorator

from celery import Celery
from celery.schedules import crontab

from only_one import only_one

app = Celery("shop", broker="redis://localhost:6379/0")
app.conf.beat_schedule = {"report": {"task": "report", "schedule": crontab()}}  # each minute


@app.task(name="report")
@only_one("{name}", at_least=50)
def report() -> str:
    """Take no time."""
    return "reported"
