"""The example of fencing: a holder that is paused past its lease, and a store that refuses its late write."""

from __future__ import annotations

import pytest

from examples.fencing import main
from tests.programs import ROOT


def test_a_writer_that_is_paused_past_its_lease_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example as it is shown."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", "")  # which the example sets, and which is put back
    main()
    assert capsys.readouterr().out.splitlines() == [
        "a writer has begun, and is paused",
        "another writes: written",
        "the first one goes on, and writes: refused",
    ]
