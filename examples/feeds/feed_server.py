"""An HTTP server on loopback with RSS feeds, each as slow as feeds can be."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FEEDS = {"planet": 2.1, "news": 2.6, "weather": 1.8, "jobs": 3.2}
"""Seconds until the server answers, by the name of the feed."""


def document(name: str) -> bytes:
    """A feed as XML.

    Args:
        name: the feed's name.
    """
    items = "".join(f"<item><title>Entry {number} of {name}</title></item>" for number in range(12))
    return f'<rss version="2.0"><channel>{items}</channel></rss>'.encode()


class SlowHandler(BaseHTTPRequestHandler):
    """Answers with a feed, late."""

    def do_GET(self) -> None:
        """Serve the feed that the path names."""
        name = self.path.removeprefix("/")
        time.sleep(FEEDS[name])
        with suppress(ConnectionError):  # the reader was killed in the middle: that is what the demo is about
            self.send_response(200)
            self.end_headers()
            self.wfile.write(document(name))

    def log_message(self, *_: object) -> None:
        """Say nothing: the terminal belongs to the picture."""


@contextmanager
def feed_server() -> Iterator[list[str]]:
    """Serve the feeds for the length of a `with` block.

    Yields:
        Their URLs.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), SlowHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield [f"http://127.0.0.1:{server.server_port}/{name}" for name in FEEDS]
        server.shutdown()
