"""docs/recipes/sentry.md: what the SDK in real workers sends to a server in place of Sentry's."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually, is_gone
from tests.live.workers import kill_tree
from tests.recipes.place import Place, SlowFile

EXAMPLE = "examples.recipes.sentry"
TASK = "import_prices"


@pytest.fixture
def sentry() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that collects events: its DSN, and what it has by now."""
    events: list[dict[str, Any]] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            # One line says what the envelope is, and two each of its items: a head and the item.
            lines = [json.loads(line) for line in gzip.decompress(body).splitlines()]
            events.extend(item for head, item in zip(lines[1::2], lines[2::2], strict=True) if head["type"] == "event")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collect) as server:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://public@127.0.0.1:{server.server_port}/1", events
        server.shutdown()


def end(worker: Guarded) -> None:
    """Shut a worker down by its main process alone: a signal to its children would be an event, too."""
    worker.terminate()
    worker.wait(LIMIT)


def test_losses_and_dead_holders_are_reported_and_skips_are_not(
    place: Place, sentry: tuple[str, list[dict[str, Any]]]
) -> None:
    dsn, events = sentry
    prices = SlowFile(place.folder / "prices")
    key = f"only_one:{TASK}:{prices.path}"
    with place.caller() as app:
        with place.worker(EXAMPLE, 2, "first", SENTRY_DSN=dsn) as first:
            running = app.send_task(TASK, [prices.path])
            assert eventually(prices.is_read)
            busy = app.send_task(TASK, [prices.path])
            with pytest.raises(Exception, match="is taken by"):
                busy.get(timeout=LIMIT)  # after its two requeues
            place.wait_for("first", rf"{TASK}\[{busy.id}\] received", 3)
            place.client.set(key, "somebody else's")
            prices.give("1\n2\n")
            assert running.get(timeout=LIMIT) == 2
            place.client.delete(key)
            end(first)
        (lost,) = events  # the worker has sent what it had to send: neither the skips nor the failure are there

        with place.worker(EXAMPLE, 1, "second", SENTRY_DSN=dsn) as second:
            app.send_task(TASK, [prices.path])
            assert eventually(prices.is_read)
            holder = place.holder(key)
            kill_tree(second)
            assert holder is not None
            assert eventually(lambda: is_gone(holder.pid))
            prices.give("")
        with place.worker(EXAMPLE, 1, "third", SENTRY_DSN=dsn) as third:
            again = app.send_task(TASK, [prices.path])
            prices.give("1\n")
            assert again.get(timeout=LIMIT) == 1
            end(third)
        _, reclaimed = events

    for event, kind, message in [(lost, "Lost", "lost"), (reclaimed, "Reclaimed", "took over")]:
        assert event["message"].startswith(f"{TASK} {message} {key} ")
        assert (event["level"], event["tags"]["only_one.key"]) == ("warning", key)
        assert event["fingerprint"] == ["only_one", kind, TASK]
        crumbs = [(each["category"], each["level"], each["message"]) for each in event["breadcrumbs"]["values"]]
        assert ("only_one", "warning", event["message"]) in crumbs  # by the logging integration, beside our event
