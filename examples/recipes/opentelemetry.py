"""Events of the producer and of all processes of a worker, counted and traced with OpenTelemetry."""

# mypy: disable-error-code="untyped-decorator"

from pathlib import Path

from celery import Celery
from celery.signals import worker_process_init
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

from only_one import Lost, only_one, subscribe
from only_one.events import Event

app = Celery("shop", broker="redis://localhost:6379/0")

tracer = trace.get_tracer("shop")
events = metrics.get_meter("shop").create_counter("only_one.events")


def observe(event: Event) -> None:
    """Count it, and add it to the span of its call."""
    kind = f"only_one.{type(event).__name__.lower()}"  # acquired, busy, reclaimed, released, lost, down
    events.add(1, {"event": kind, "task": event.name})
    if isinstance(event, Lost):  # told in a thread of its own, which has no span
        tracer.start_span(kind, attributes={"only_one.key": event.key}).end()
    else:
        trace.get_current_span().add_event(kind, {"only_one.key": event.key})


subscribe(observe)  # at import: in the producer, and in each process of the worker


@worker_process_init.connect
def start_exporting(**_: object) -> None:
    """Start the thread that exports; no thread lives on in a forked process."""
    reader = PeriodicExportingMetricReader(ConsoleMetricExporter())  # or OTLPMetricExporter
    metrics.set_meter_provider(MeterProvider([reader]))


@only_one("{name}:{path}")
@app.task(name="import_prices")
def import_prices(path: str) -> int:
    """Import a file; returns how many prices there are."""
    return len(Path(path).read_text().splitlines())


if __name__ == "__main__":
    start_exporting()
    for _ in range(2):
        import_prices.delay("prices.txt")
