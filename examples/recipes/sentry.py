"""Lost keys and dead holders, told to Sentry."""

# mypy: disable-error-code=untyped-decorator

from pathlib import Path

import sentry_sdk
from celery import Celery

from only_one import AlreadyRunning, Lost, Reclaimed, only_one, retry, subscribe
from only_one.events import Event

sentry_sdk.init(ignore_errors=[AlreadyRunning])  # the DSN is in SENTRY_DSN

app = Celery("shop", broker="redis://localhost:6379/0")


def report(event: Event) -> None:
    """Report the events that somebody has to look at."""
    if isinstance(event, (Lost, Reclaimed)):
        with sentry_sdk.new_scope() as scope:
            scope.fingerprint = ["only_one", type(event).__name__, event.name]
            scope.set_tag("only_one.key", event.key)
            scope.capture_message(str(event), level="warning")


subscribe(report)


@app.task(name="import_prices")
@only_one("{name}:{path}", when_busy=retry(countdown=1, max_retries=2))
def import_prices(path: str) -> int:
    """Import a file; returns how many prices there are."""
    return len(Path(path).read_text().splitlines())
