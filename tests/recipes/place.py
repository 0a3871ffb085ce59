"""Where tests of recipes run what the pages show: a folder, a server, workers, beat, web servers, and their logs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from celery import Celery
from redis import Redis

from only_one.holder import Holder
from only_one.testing import Guarded
from rigs.programs import Logged
from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT, celery_worker, sender

PAGES = ROOT / "docs" / "recipes"

_VARIES = r"\d{4}-\d\d-\d\d [\d:,]+|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|(?<= on )[\w.-]+|\d+\.?\d*"
"""In a line of a log: times, ids, names of hosts, numbers."""


class Place:
    """A folder with a server that is the broker, too, and what is started there.

    Attributes:
        client: a client of the server.
        env: what is told to whatever is started.
    """

    def __init__(self, url: str, client: Redis, folder: Path) -> None:
        self.url, self.client, self.folder = url, client, folder
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        patient = f"{url}?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
        brokers = dict.fromkeys(("CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"), url)
        self.env = {**os.environ, **brokers, "ONLY_ONE_REDIS_URL": patient, "PYTHONPATH": path}

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, without anything on standard input."""
        return subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT, check=False,
        )  # fmt: skip

    @contextmanager
    def running(self, name: str, *command: str) -> Iterator[Guarded]:
        """A module of Python's that runs until the end of the block, with a log of this name."""
        with Logged([sys.executable, "-m", *command], self.folder / name, cwd=self.folder, env=self.env) as process:
            yield process
        print(process.text[-20_000:])

    def worker(self, module: str, size: int, name: str = "worker", **env: str) -> AbstractContextManager[Guarded]:
        """A worker of so many processes."""
        options = ["-n", f"{name}@%h", "-Ofair"]
        return celery_worker(module, self.folder / name, {**self.env, **env}, *options, size=size)

    @contextmanager
    def serving(self, application: str, *options: str) -> Iterator[tuple[str, Guarded]]:
        """An application under uvicorn: its address, and its process, as soon as it answers."""
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        with self.running("uvicorn", "uvicorn", application, "--port", str(port), *options) as process:
            assert eventually(lambda: process.poll() is not None or not refuses(url), pause=0.1)
            assert process.poll() is None
            yield url, process

    @contextmanager
    def caller(self) -> Iterator[Celery]:
        """An application that sends tasks by their names, for examples that are not to be imported here."""
        app = Celery("caller", set_as_current=False)
        with sender(app, self.url):
            yield app

    def log(self, name: str) -> str:
        """What has been said."""
        return (self.folder / name).read_text(errors="replace")

    def wait_for(self, name: str, pattern: str, times: int = 1) -> None:
        """Wait until a log has a pattern so many times."""
        found = re.compile(pattern, re.MULTILINE)
        assert eventually(lambda: len(found.findall(self.log(name))) >= times, 2 * LIMIT), pattern

    def holder(self, key: str) -> Holder | None:
        """Who holds a key."""
        value: Any = self.client.get(key)
        return Holder.parse(value or b"")


def refuses(url: str) -> bool:
    """Whether no request is answered there, whatever the answer."""
    try:
        httpx.get(f"{url}/nothing-here", timeout=LIMIT)
    except httpx.TransportError:
        return True
    return False


def shown_in(page: str) -> list[str]:
    """The lines of logs that a page shows, as patterns of which times, ids and hosts are left out."""
    blocks = re.findall(r"^```text\n(.*?)^```", (PAGES / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [r"\S+(?: [\d:,]+)?".join(map(re.escape, re.split(_VARIES, line))) for line in lines]
