"""Events of all processes of a worker, counted for Prometheus."""

# mypy: disable-error-code="untyped-decorator,no-untyped-call"

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from celery import Celery
from celery.signals import worker_ready
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from redis.exceptions import RedisError

from only_one import Released, only_one, subscribe
from only_one.events import Event
from only_one.inspection import held

app = Celery("shop", broker="redis://localhost:6379/0")

EVENTS = Counter("only_one_events", "What happened to calls.", ["task", "event"])
SECONDS = Histogram("only_one_run_seconds", "How long runs held their keys.", ["task"])


def count(event: Event) -> None:
    """Count it: Acquired, Busy, Reclaimed, Released, Lost, Down."""
    for rare in ("Lost", "Down"):
        EVENTS.labels(event.name, rare)  # a 0, without which Prometheus does not see the first as an increase
    EVENTS.labels(event.name, type(event).__name__).inc()
    if isinstance(event, Released):
        SECONDS.labels(event.name).observe(event.seconds)


subscribe(count)  # at import, which each process of the worker has behind it


class HeldKeys(Collector):
    """For each task, since how long the oldest key of its runs is held: asked of Redis at each scrape."""

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Ask."""
        since: dict[str, float] = {}
        with suppress(RedisError):  # the other metrics are served all the same
            for holder in filter(None, (each.holder for each in held())):
                if holder.state == "running":
                    since[holder.name] = min(holder.since, since.get(holder.name, holder.since))
        gauge = GaugeMetricFamily("only_one_held_seconds", "Since how long the oldest key is held.", labels=["task"])
        for name, begun in since.items():
            gauge.add_metric([name], time.time() - begun)
        yield gauge


@worker_ready.connect
def serve(**_: object) -> None:
    """Serve the sums of all processes, from the worker's main process."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    registry.register(HeldKeys())
    start_http_server(int(os.environ.get("METRICS_PORT", "9808")), registry=registry)


@app.task(name="import_prices")
@only_one("{name}:{path}")
def import_prices(path: str) -> int:
    """Import a file; returns how many prices there are."""
    return len(Path(path).read_text().splitlines())
