"""An HTTP server on loopback with RSS and Atom feeds, each as slow as feeds can be."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNKS = 20


@dataclass(frozen=True)
class Feed:
    """A feed to serve.

    Attributes:
        name: the last part of its URL; the suffix says whether it is RSS or Atom.
        delay: seconds until the first byte.
        drip: seconds from the first byte to the last.
    """

    name: str
    delay: float
    drip: float


FEEDS = (
    Feed("planet.atom", 0.1, 2.0),
    Feed("news.rss", 2.6, 0.0),
    Feed("weather.atom", 1.0, 1.6),
    Feed("jobs.rss", 0.2, 3.0),
    Feed("talks.atom", 1.8, 0.0),
    Feed("music.rss", 0.0, 2.4),
)

RSS = '<?xml version="1.0"?><rss version="2.0"><channel><title>{name}</title>{entries}</channel></rss>'
RSS_ENTRY = (
    "<item><guid>urn:{name}:{number}</guid><title>Entry {number}</title><link>http://{name}/{number}</link>"
    "<pubDate>Mon, 01 Jan 2024 00:{number:02}:00 GMT</pubDate></item>"
)
ATOM = '<?xml version="1.0"?><feed xmlns="http://www.w3.org/2005/Atom"><title>{name}</title>{entries}</feed>'
ATOM_ENTRY = (
    '<entry><id>urn:{name}:{number}</id><title>Entry {number}</title><link href="http://{name}/{number}"/>'
    "<updated>2024-01-01T00:{number:02}:00Z</updated></entry>"
)


def document(name: str, length: int = 12) -> bytes:
    """A feed as XML, RSS or Atom by its name's suffix.

    Args:
        name: the feed's name.
        length: how many entries it has.
    """
    whole, entry = (RSS, RSS_ENTRY) if name.endswith(".rss") else (ATOM, ATOM_ENTRY)
    entries = "".join(entry.format(name=name, number=number) for number in range(length))
    return whole.format(name=name, entries=entries).encode()


class SlowHandler(BaseHTTPRequestHandler):
    """Answers with a feed, late and drop by drop."""

    def do_GET(self) -> None:
        """Serve the feed that the path names."""
        feed = next((feed for feed in FEEDS if self.path == f"/{feed.name}"), None)
        if feed is None:
            self.send_error(404)
            return
        with suppress(ConnectionError):  # the reader was killed in the middle: that is what the demo is about
            self._drip(feed, document(feed.name))

    def _drip(self, feed: Feed, body: bytes) -> None:
        time.sleep(feed.delay)
        self.send_response(200)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        size = len(body) // CHUNKS + 1
        for start in range(0, len(body), size):
            time.sleep(feed.drip / CHUNKS)
            self.wfile.write(body[start : start + size])

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal belongs to the timeline."""


@contextmanager
def feed_server(length: int) -> Iterator[list[str]]:
    """Serve feeds for the length of a `with` block.

    Args:
        length: how many feeds.

    Yields:
        Their URLs.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield [f"http://127.0.0.1:{server.server_port}/{feed.name}" for feed in FEEDS[:length]]
        finally:
            server.shutdown()
