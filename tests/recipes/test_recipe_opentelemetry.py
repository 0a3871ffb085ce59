"""docs/recipes/opentelemetry.md: the SDK exports what happened in the producer, and what happened in a worker."""

from __future__ import annotations

import ast
import re
import shutil
import sys

from tests.live.workers import ROOT
from tests.recipes.place import Place

EXPORTED = r'"event": "only_one\.(\w+)"'

SPANS = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import examples.recipes.opentelemetry
from only_one import only_one

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

@only_one("count-stock")
def count_stock():
    return count_stock()  # a run that calls itself is skipped

@only_one("import-prices", timeout=0.1)
def import_prices():
    while "only_one.lost" not in [span.name for span in exporter.get_finished_spans()]:
        pass  # work that takes longer than the timeout, of which another thread tells

with trace.get_tracer("shop").start_as_current_span("nightly"):
    count_stock()
    import_prices()
print({span.name: [event.name for event in span.events] for span in exporter.get_finished_spans()})
"""


def test_the_producer_and_the_worker_both_count(place: Place) -> None:
    shutil.copy(ROOT / "examples" / "recipes" / "opentelemetry.py", place.folder / "shop.py")
    (place.folder / "prices.txt").write_text("tea 3\n")
    produced = place.run(sys.executable, "shop.py")  # which exports once, at its end
    assert re.findall(EXPORTED, produced.stdout) == ["busy"]
    place.env["OTEL_METRIC_EXPORT_INTERVAL"] = "200"
    with place.running("worker", "celery", "-A", "shop", "worker", "-l", "INFO", "-c", "1"):
        place.wait_for("worker", '"event": "only_one.released"')
    assert {*re.findall(EXPORTED, place.log("worker"))} == {"acquired", "released"}


def test_each_event_is_in_the_span_of_its_call(place: Place) -> None:
    spans = ast.literal_eval(place.run(sys.executable, "-c", SPANS).stdout)
    runs = [["acquired", "busy", "released"], ["acquired", "released"]]
    assert spans == {"nightly": [f"only_one.{each}" for run in runs for each in run], "only_one.lost": []}
