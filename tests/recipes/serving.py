"""ASGI applications under a real uvicorn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from only_one.testing import Guarded
from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually


@contextmanager
def serving(application: str, folder: Path, env: dict[str, str], *options: str) -> Iterator[tuple[str, Guarded]]:
    """Serve an application for the length of a `with` block; its log is printed at the end.

    Args:
        application: its module and name, as uvicorn has them.
        folder: where it is.
        env: what it is told.
        options: more of uvicorn's command line.

    Yields:
        Its address and its process, as soon as it answers.
    """
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "uvicorn", application, "--port", str(port), *options]
    url, log = f"http://127.0.0.1:{port}", folder / f"uvicorn-{port}.log"
    try:
        with log.open("wb") as output, Guarded(command, cwd=folder, env=env, stdout=output, stderr=output) as process:
            assert eventually(lambda: process.poll() is not None or not refuses(url), pause=0.1)
            assert process.poll() is None
            yield url, process
    finally:
        print(log.read_text(errors="replace")[-20_000:])


def refuses(url: str) -> bool:
    """Whether no request is answered there, whatever the answer."""
    try:
        httpx.get(f"{url}/nothing-here", timeout=LIMIT)
    except httpx.TransportError:
        return True
    return False
