"""The newsletter's parts and its command line; what its tasks do is in `tests/live/test_newsletter.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from examples.newsletter import making, recipients, sending
from examples.newsletter.recipients import CHUNK
from rigs.waiting import LIMIT, eventually
from tests.programs import program

NEWSLETTER = "examples.newsletter"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A house with 30 people, of whom 27 are written to, in three chunks."""
    monkeypatch.setenv("NEWSLETTER_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(recipients, "SIZE", 10)
    recipients.have_people(30)
    recipients.have_people(1000)  # which changes nothing
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_a_chunk_is_found_by_its_ids() -> None:
    with recipients.database() as connection:
        plan = "\n".join(row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN {CHUNK}", (10, 20)))
    assert "SEARCH recipients USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in plan
    assert [each.id for each in recipients.chunk(1)] == [*range(11, 20)]
    assert recipients.unsubscribed(15, 30) == {20, 30}


def test_a_chunk_that_breaks_off_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(making, "letter", lambda _, recipient: "x" * 10_000 * (9 // (9 - recipient.id)))
        with pytest.raises(ZeroDivisionError):
            making.make("spring", 0)
    assert [each.suffix for each in (folder / "spring").iterdir()] == [".part"]
    assert making.missing("spring") == [0, 1, 2]
    assert making.make("spring", 0) == 9
    assert making.missing("spring") == [1, 2]
    with pytest.raises(sending.IncompleteError, match=r"^2 of 3 chunks of spring are missing, the first is 1$"):
        sending.deliver("spring", lambda: None)
    assert [(entry.id, entry.address) for entry in making.read("spring", 0)][8] == (9, "person-9@example.net")
    assert making.make("spring", 0) == 0


# The command line


def test_what_is_broken_off_goes_on_at_the_next_start(tmp_path: Path) -> None:
    arguments = ["--recipients", 1000, "--directory", tmp_path]
    accepted = tmp_path / "accepted"
    with program(NEWSLETTER, tmp_path, *arguments) as news:
        assert eventually(lambda: accepted.exists() and accepted.stat().st_size > 0)
        news.kill()
    assert accepted.read_text().count("\n") < 900
    with program(NEWSLETTER, tmp_path, *arguments) as news:
        assert news.wait(2 * LIMIT) == 0, news.text
    for trouble in ("Traceback", "Exception ignored"):
        assert trouble not in news.text
    ((mails, twice),) = re.findall(r"^the SMTP server has accepted (\d+) mails: (\d+) twice$", news.text, re.MULTILINE)
    assert int(mails) - int(twice) == 900
    assert int(twice) <= 1
