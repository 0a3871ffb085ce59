"""One index is built, and one more call waits: the newest."""

# mypy: disable-error-code=untyped-decorator

from pathlib import Path

from celery import Celery

from only_one import buffer_one, only_one

app = Celery("shop", broker="redis://localhost:6379/0", backend="redis://localhost:6379/0")


@app.task(name="rebuild_index")
@only_one("{name}", when_busy=buffer_one())  # below: each call is a message, and the worker keeps the newest
def rebuild_index(catalogue: str) -> int:
    """Build it; returns how many products are in it."""
    return len(Path(catalogue).read_text().splitlines())


@only_one("{name}", when_busy=buffer_one())  # above: and a call that equals the waiting one is not published
@app.task(name="rebuild_search")
def rebuild_search(catalogue: str) -> int:
    """Build it; returns how many products are in it."""
    return len(Path(catalogue).read_text().splitlines())
