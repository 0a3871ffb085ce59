"""The example of fencing: a holder that is paused past its lease, and a store that refuses its late write."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.fencing.__main__ import main
from examples.fencing.store import StaleWrite, read, write
from tests.programs import ROOT


def test_the_store_refuses_what_is_older(tmp_path: Path) -> None:
    store = tmp_path / "reports.sqlite"
    for text, fence in [("first", 5), ("again by the same run", 5), ("later", 7)]:
        write(store, "report", text, fence)
    with pytest.raises(StaleWrite, match="later run"):
        write(store, "report", "stale", 6)
    write(store, "another", "has numbers of its own", 1)
    assert [read(store, name) for name in ("report", "another")] == ["later", "has numbers of its own"]


def test_a_writer_that_is_paused_past_its_lease_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example as it is shown."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", "")  # which the example sets, and which is put back
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == [
        "a writer has begun, and is paused",
        "its lease is over",
        "another writes: written",
        "the first one goes on, and writes: refused",
        "in the store: new",
    ]
