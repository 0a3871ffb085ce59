"""The example of fencing: a holder that is paused past its lease, and a store that refuses its late write."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.fencing.__main__ import main
from examples.fencing.store import StaleWrite, Store

ROOT = Path(__file__).parents[1]


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


@pytest.mark.usefixtures("database")
def test_a_writer_that_is_paused_past_its_lease_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The example as it is shown."""
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "a writer has begun, and is paused",
        "its lease is over",
        "another writes: written",
        "the first one goes on, and writes: refused",
        "in the store: new",
    ]
