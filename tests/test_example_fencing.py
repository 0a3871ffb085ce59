"""The example of fencing: a holder that is paused past its lease, and a store that refuses its late write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.fencing.__main__ import writer
from examples.fencing.store import StaleWrite, Store
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
KEY = "only_one:report"


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)
    return tmp_path / "reports.sqlite"


def test_the_store_refuses_what_is_older(database: Path) -> None:
    store = Store(database)
    assert store.read("report") is None
    store.write("report", "first", 5)
    store.write("report", "again by the same run", 5)
    store.write("report", "later", 7)
    for fence in (5, 6, 0):
        with pytest.raises(StaleWrite, match="later run"):
            store.write("report", "stale", fence)
    assert store.read("report") == "later"
    store.write("another", "has numbers of its own", 1)
    assert store.read("another") == "has numbers of its own"


def test_a_writer_that_is_paused_past_its_lease_is_refused(server: Any, database: Path) -> None:
    import redis  # noqa: PLC0415 - the fixture of that name is not meant

    with redis.Redis.from_url(server.url) as client, writer(server.url, database, "old") as first:
        assert first.read() == "begun"
        token = client.get(KEY)
        first.signal(signal.SIGSTOP)
        assert eventually(lambda: not client.exists(KEY))
        with writer(server.url, database, "new") as second:
            assert second.read() == "begun"
            assert client.get(KEY) not in (None, token)
            assert second.finish() == "written"
        first.signal(signal.SIGCONT)
        assert first.finish() == "refused"
    assert Store(database).read("report") == "new"


def test_a_writer_that_is_paused_and_finds_nobody_later_writes(server: Any, database: Path) -> None:
    """It is the newest still, and nobody is hurt."""
    import redis  # noqa: PLC0415 - the fixture of that name is not meant

    with redis.Redis.from_url(server.url) as client, writer(server.url, database, "old") as first:
        assert first.read() == "begun"
        with writer(server.url, database, "beside") as beside:
            assert beside.read() == "skipped"
        first.signal(signal.SIGSTOP)
        assert eventually(lambda: not client.exists(KEY))
        first.signal(signal.SIGCONT)
        assert first.finish() == "written"
    assert Store(database).read("report") == "old"


def test_the_example_as_it_is_shown(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.fencing"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "a writer has begun, and is paused",
        "its lease is over",
        "another writes: written",
        "the first one goes on, and writes: refused",
        "in the store: new",
    ]
