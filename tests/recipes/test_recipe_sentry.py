"""docs/recipes/sentry.md: what the SDK in real workers sends to a server in place of Sentry's."""

from __future__ import annotations

import gzip
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from rigs.waiting import LIMIT, eventually, is_gone
from tests.live.workers import kill_tree
from tests.recipes.place import Place, SlowFile

EXAMPLE = "examples.recipes.sentry"
TASK = "import_prices"


class Sentry(BaseHTTPRequestHandler):
    """Collects the events that it is sent."""

    events: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        # One line says what the envelope is, and two each of its items: a head and the item.
        lines = [json.loads(line) for line in gzip.decompress(body).splitlines()]
        self.events.extend(item for head, item in zip(lines[1::2], lines[2::2], strict=True) if head["type"] == "event")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_losses_and_dead_holders_are_reported_and_skips_are_not(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sentry, "events", [], raising=False)
    prices = SlowFile(place.folder / "prices")
    key = f"only_one:{TASK}:{prices.path}"
    with ThreadingHTTPServer(("127.0.0.1", 0), Sentry) as server, place.caller() as app:
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        place.env["SENTRY_DSN"] = f"http://public@127.0.0.1:{server.server_port}/1"
        with place.worker(EXAMPLE, 1, "killed") as killed:
            app.send_task(TASK, [prices.path])
            assert eventually(prices.is_read)
            holder = place.holder(key)
            kill_tree(killed)
            assert holder is not None
            assert eventually(lambda: is_gone(holder.pid))
            assert place.client.persist(key)  # a worker may take longer to start than the lease lasts
            prices.give("")
        with place.worker(EXAMPLE, 2, "worker") as worker:
            running = app.send_task(TASK, [prices.path])  # which takes the key over
            assert eventually(prices.is_read)
            busy = app.send_task(TASK, [prices.path])
            with pytest.raises(Exception, match="is taken by"):
                busy.get(timeout=LIMIT)  # after its two requeues
            place.wait_for("worker", rf"{TASK}\[{busy.id}\] received", 3)
            place.client.set(key, "somebody else's")
            prices.give("1\n2\n")
            assert running.get(timeout=LIMIT) == 2
            # By its main process alone: a signal to its children would be an event, too.
            worker.terminate()
            worker.wait(LIMIT)
        server.shutdown()

    # The worker has sent what it had to send: neither the skips nor the failure are there.
    for event, kind, message in zip(Sentry.events, ("Reclaimed", "Lost"), ("took over", "lost"), strict=True):
        assert event["message"].startswith(f"{TASK} {message} {key} ")
        assert (event["level"], event["tags"]["only_one.key"]) == ("warning", key)
        assert event["fingerprint"] == ["only_one", kind, TASK]
        crumbs = [(each["category"], each["level"], each["message"]) for each in event["breadcrumbs"]["values"]]
        assert ("only_one", "warning", event["message"]) in crumbs  # by the logging integration, beside our event
