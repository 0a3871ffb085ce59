"""What the tests of recipes share: files that keep runs waiting, workers of an example, and what a page shows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from celery import Celery

from only_one.testing import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT, celery_worker, sender

PAGES = ROOT / "docs" / "recipes"

_VARIES = r"\d{4}-\d\d-\d\d [\d:,]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<= on )[\w.-]+|\d+\.?\d*"
"""In a line of a log: times, ids, names of hosts, numbers."""


class SlowFile:
    """A named pipe: a run that reads it waits until the test gives it something to read.

    Args:
        path: where it is to be.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._pipe: int | None = None

    def is_read(self) -> bool:
        """Whether a run has begun to read it, and waits."""
        if self._pipe is None:
            with suppress(OSError):  # there is no reader
                self._pipe = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
        return self._pipe is not None

    def forget_reader(self) -> None:
        """The run that has read it is dead; another may read it."""
        assert self._pipe is not None
        os.close(self._pipe)
        self._pipe = None

    def give(self, text: str) -> None:
        """Let the run that reads it go on, which is waited for."""
        assert eventually(self.is_read), f"nobody reads {self.path}"
        assert self._pipe is not None
        os.write(self._pipe, text.encode())
        self.forget_reader()


class Shop:
    """A server, which is the broker, too, and workers of an example, whose environment says so.

    Args:
        server: the server.
        module: the example.
        folder: where their logs are.
    """

    def __init__(self, server: RedisServer, module: str, folder: Path) -> None:
        self.url, self.module, self.folder = server.url, module, folder
        urls = dict.fromkeys(("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND", "ONLY_ONE_REDIS_URL"), server.url)
        self.env = {**os.environ, **urls}

    @contextmanager
    def worker(self, name: str, size: int, **env: str) -> Iterator[Any]:
        """A worker of so many processes, until the end of the block."""
        options = ["-n", f"{name}@%h", "-Ofair"]
        with celery_worker(self.module, self.folder / name, {**self.env, **env}, *options, size=size) as process:
            yield process

    def log(self, name: str) -> str:
        """What a worker has said."""
        return (self.folder / name).read_text(errors="replace")

    def wait_for(self, name: str, pattern: str, times: int = 1) -> None:
        """Wait until its log has a pattern so many times."""
        assert eventually(lambda: len(re.findall(pattern, self.log(name))) >= times, 2 * LIMIT), pattern


@contextmanager
def shop(module: str, folder: Path) -> Iterator[Shop]:
    """The server of an example."""
    with redis_server() as server:
        yield Shop(server, module, folder)


@contextmanager
def caller(url: str) -> Iterator[Celery]:
    """An application that sends tasks by their names, for examples that are not to be imported here."""
    app = Celery("caller", set_as_current=False)
    with sender(app, url):
        yield app


def shown_in(page: str) -> list[str]:
    """The lines of logs that a page shows, as patterns of which times, ids and hosts are left out."""
    blocks = re.findall(r"^```text\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [r"\S+(?: [\d:,]+)?".join(map(re.escape, re.split(_VARIES, line))) for line in lines]
