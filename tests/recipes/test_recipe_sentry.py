"""docs/recipes/sentry.md: what the SDK in real workers sends to a server in place of Sentry's."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from only_one.lock.holder import Holder
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually, is_gone
from tests.live.workers import kill_tree
from tests.recipes.helpers import SlowFile, caller, shop

EXAMPLE = "examples.recipes.sentry"
TASK = "import_prices"


@contextmanager
def sentry() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server that collects events; yields its DSN, and what it has by now."""
    events: list[dict[str, Any]] = []

    class Collect(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Encoding"] == "gzip"
            # One line says what the envelope is, and two each of its items: a head and the item.
            lines = [json.loads(line) for line in gzip.decompress(body).splitlines()]
            events.extend(item for head, item in zip(lines[1::2], lines[2::2], strict=True) if head["type"] == "event")
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collect) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://public@127.0.0.1:{server.server_port}/1", events
        finally:
            server.shutdown()
            thread.join(LIMIT)


@contextmanager
def published(client: Any) -> Iterator[list[str]]:
    """What is published to the worker's queue until the end of the block."""
    messages: list[str] = []
    with client.monitor() as monitor:

        def collect() -> None:
            for each in monitor.listen():
                if each["command"].startswith("LPUSH celery "):
                    messages.append(each["command"])
                elif each["command"] == "ECHO over":
                    return

        thread = Thread(target=collect)
        thread.start()
        yield messages
        client.echo("over")
        thread.join(LIMIT)


def end(worker: Guarded) -> None:
    """Shut a worker down by its main process alone: a signal to its children would be an event, too."""
    worker.terminate()
    worker.wait(LIMIT)


def test_losses_and_dead_holders_are_reported_and_skips_are_not(tmp_path: Path) -> None:
    prices = SlowFile(tmp_path / "prices")
    key = f"only_one:{TASK}:{prices.path}"
    with sentry() as (dsn, events), shop(EXAMPLE, tmp_path) as place, caller(place.url) as app:
        client = app.backend.client
        with place.worker("first", 2, SENTRY_DSN=dsn) as first:
            running = app.send_task(TASK, [prices.path])
            assert eventually(prices.is_read)
            with published(client) as messages:
                busy = app.send_task(TASK, [prices.path])
                with pytest.raises(Exception, match="is taken by"):
                    busy.get(timeout=LIMIT)
            client.set(key, "somebody else's")
            prices.give("1\n2\n")
            assert running.get(timeout=LIMIT) == 2
            client.delete(key)
            assert eventually(lambda: events)
            end(first)
        # The worker has ended, and has sent what it had to send: neither the skips nor the failure are there.
        (lost,) = events
        _, *requeued = [json.loads(message.removeprefix("LPUSH celery "))["headers"] for message in messages]
        assert [headers["only_one"]["times"] for headers in requeued] == [1, 2]
        assert all("sentry-trace" in headers for headers in requeued)

        with place.worker("second", 1, SENTRY_DSN=dsn) as second:
            app.send_task(TASK, [prices.path])
            assert eventually(prices.is_read)
            holder = Holder.parse(client.get(key))
            kill_tree(second)
            assert holder is not None
            assert eventually(lambda: is_gone(holder.pid))
            prices.forget_reader()
        with place.worker("third", 1, SENTRY_DSN=dsn) as third:
            again = app.send_task(TASK, [prices.path])
            prices.give("1\n")
            assert again.get(timeout=LIMIT) == 1
            assert eventually(lambda: len(events) > 1)
            end(third)
        _, reclaimed = events

    for event, kind, message in [(lost, "Lost", "lost"), (reclaimed, "Reclaimed", "took over")]:
        assert event["message"].startswith(f"{TASK} {message} {key} ")
        assert (event["level"], event["tags"]["only_one.key"]) == ("warning", key)
        assert event["fingerprint"] == ["only_one", kind, TASK]
        fields = ("category", "level", "message")
        crumbs = [tuple(map(each.get, fields)) for each in event["breadcrumbs"]["values"]]
        assert ("only_one", "warning", event["message"]) in crumbs  # by the logging integration, beside our event
