"""docs/recipes/opentelemetry.md, prometheus.md and sentry.md: what is exported, scraped and reported of events."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys

import httpx
import yaml

from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually
from tests.decorated import token_of_the_dead
from tests.live.workers import ROOT
from tests.recipes.place import Place

# --- OpenTelemetry ---

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


# --- Prometheus ---

TASK = "import_prices"
ALERTS = yaml.safe_load((ROOT / "examples" / "recipes" / "alerts.yml").read_text())["groups"][0]["rules"]


def test_a_scrape_has_the_sums_of_all_processes(place: Place) -> None:
    """A run waits at a named pipe, from when the test can open it until the test closes it."""
    (port,) = free_ports(1)
    files, teas, mugs = (place.folder / name for name in ("metrics", "teas", "mugs"))
    files.mkdir()
    for pipe in (teas, mugs):
        os.mkfifo(pipe)
    env = {"PROMETHEUS_MULTIPROC_DIR": str(files), "METRICS_PORT": str(port)}

    def scraped(name: str) -> float:
        # The answer is 500 where a process has created its file and not yet lengthened it.
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0)

    def counted(event: str) -> float:
        return scraped(f'only_one_events_total{{event="{event}",task="{TASK}"}}')

    with place.worker("examples.recipes.prometheus", 2, **env), place.caller() as app:
        app.send_task(TASK, [str(teas)])
        with teas.open("w") as first:
            app.send_task(TASK, [str(teas)])  # which the other process skips
            assert eventually(lambda: counted("Busy") == 1)
            assert scraped(f'only_one_held_seconds{{task="{TASK}"}}') > 0
            served = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT).text
            for alert in ALERTS:
                metric, kind = re.findall(r"(only_one_\w+)(?:{event=\"(\w+)\"})?", alert["expr"])[0]
                assert (f'{metric}{{event="{kind}",task="{TASK}"}} 0.0' if kind else metric) in served
            app.send_task(TASK, [str(mugs)])
            with mugs.open("w") as second:
                place.client.set(f"only_one:{TASK}:{mugs}", "somebody else's")
                for each in (first, second):
                    each.write("1\n2\n")
        assert eventually(lambda: counted("Lost") == 1)
        assert eventually(lambda: scraped(f'only_one_run_seconds_count{{task="{TASK}"}}') == 2)
        assert [counted(event) for event in ("Acquired", "Busy")] == [2, 1]
        assert len(list(files.glob("counter_*.db"))) == 2  # one of each process


# --- Sentry ---

REPORTS = """
import json, os, sentry_sdk
from redis import Redis
from examples.recipes.sentry import import_prices
from only_one import Acquired, subscribe
from rigs.waiting import eventually

sent = []
sentry_sdk.get_client().transport.capture_envelope = lambda envelope: sent.append(envelope.get_event())
client = Redis.from_url(os.environ["ONLY_ONE_REDIS_URL"])
subscribe(lambda event: isinstance(event, Acquired) and client.set(event.key, "somebody else's"))
assert import_prices.apply(["prices"]).get() == 2  # which takes over the key of a dead process, and loses it
assert import_prices.apply(["prices"]).failed()  # as its key is busy
eventually(lambda: len(sent) == 2)
print(json.dumps(sent))
"""


def test_losses_and_dead_holders_are_reported_and_skips_are_not(place: Place) -> None:
    (place.folder / "prices").write_text("1\n2\n")
    key = "only_one:import_prices:prices"
    place.client.set(key, token_of_the_dead())
    ran = place.run(sys.executable, "-c", REPORTS, SENTRY_DSN="http://public@127.0.0.1:1/1")
    assert ran.returncode == 0, ran.stderr
    events = json.loads(ran.stdout.splitlines()[-1])
    for event, kind, message in zip(events, ("Reclaimed", "Lost"), ("took over", "lost"), strict=True):
        assert event["message"].startswith(f"import_prices {message} {key} ")
        assert (event["level"], event["tags"]["only_one.key"]) == ("warning", key)
        assert event["fingerprint"] == ["only_one", kind, "import_prices"]
