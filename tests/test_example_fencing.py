"""The example of fencing: a holder that is paused past its lease, and a store that refuses its late write."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.fencing import main, read, write
from tests.programs import ROOT


def test_the_store_refuses_what_is_older(tmp_path: Path) -> None:
    store = str(tmp_path / "reports.sqlite")
    fences = {"first": 5, "again by the same run": 5, "later": 7, "stale": 6}
    assert [write(store, "report", *each) for each in fences.items()] == ["written", "written", "written", "refused"]
    assert write(store, "another", "has numbers of its own", 1) == "written"
    assert [read(store, name) for name in ("report", "another")] == ["later", "has numbers of its own"]


def test_a_writer_that_is_paused_past_its_lease_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example as it is shown."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", "")  # which the example sets, and which is put back
    main()
    assert capsys.readouterr().out.splitlines() == [
        "a writer has begun, and is paused",
        "its lease is over",
        "another writes: written",
        "the first one goes on, and writes: refused",
        "in the store: new",
    ]
