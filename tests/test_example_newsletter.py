"""The newsletter's parts and its command line; what its tasks do is in `tests/live/test_newsletter.py`."""

from __future__ import annotations

import re
import signal
import smtplib
from contextlib import nullcontext
from email import message_from_string, policy
from pathlib import Path
from typing import Any

import pytest

from examples.newsletter import making, recipients, sending
from examples.newsletter.letter import letter
from examples.newsletter.recipients import CHUNK, NAMES, Recipient
from rigs.waiting import eventually
from tests.programs import Program, program

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


@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_the_personal_fields(name: str) -> None:
    raw = letter("spring", Recipient(7, "person-7@example.net", name))
    message: Any = message_from_string(raw, policy=policy.default)
    assert not message.defects
    assert raw.isascii()
    (to,) = message["To"].addresses
    assert (to.display_name, to.addr_spec) == (name, "person-7@example.net")
    assert message["Message-ID"] == "<spring.7@example.org>"
    assert message.get_content().startswith(f"Dear {name},\r\n")


def test_a_chunk_that_breaks_off_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(making, "letter", lambda _, recipient: "x" * 10_000 * (9 // (9 - recipient.id)))
        with pytest.raises(ZeroDivisionError):
            making.make("spring", 0)
    assert [each.suffix for each in (folder / "spring").iterdir()] == [".part"]
    assert making.missing("spring") == [0, 1, 2]
    assert making.make("spring", 0) == 9
    assert making.missing("spring") == [1, 2]
    assert [(entry.id, entry.address) for entry in making.read("spring", 0)][8] == (9, "person-9@example.net")
    assert making.make("spring", 0) == 0


def test_who_is_refused_for_good_is_not_tried_again_and_who_is_refused_for_now_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted: list[str] = []
    refused: dict[str, Exception] = {}

    class Picky:
        """A server that refuses some recipients, and some messages, for good or for now."""

        def sendmail(self, _: str, to: list[str], __: str) -> None:
            if to[0] in refused:
                raise refused[to[0]]
            accepted.append(to[0])

    def deliver() -> int:
        return sending.deliver("spring", lambda: None)

    for number in range(3):
        making.make("spring", number)
    (folder / "spring" / "000000.new").write_bytes(b"..")  # of one that was killed when it began a journal
    monkeypatch.setenv("NEWSLETTER_SMTP", "127.0.0.1:25")
    monkeypatch.setattr(smtplib, "SMTP", lambda *_, **__: nullcontext(Picky()))
    for_good, by_message, for_now = (f"person-{number}@example.net" for number in (3, 17, 25))
    refused[for_good] = smtplib.SMTPRecipientsRefused({for_good: (550, b"refused")})
    refused[by_message] = smtplib.SMTPDataError(554, b"refused")
    for error in (smtplib.SMTPRecipientsRefused({for_now: (451, b"refused")}), smtplib.SMTPDataError(451, b"refused")):
        refused[for_now] = error
        with pytest.raises(OSError, match="refused"):
            deliver()
    del refused[for_now]
    assert [deliver(), deliver()] == [5, 0]
    assert len({*accepted}) == len(accepted) == 25
    assert sorted(sending.journals("spring")) == [b"aaaaaaaaa.", b"aaaaaaraa.", b"aaraaaaaa."]


# The command line


def ends_well(news: Program) -> tuple[int, int]:
    """Wait until it has been sent; returns how many mails the server has accepted, and how many of them twice."""
    assert news.wait() == 0, news.text
    assert "Traceback" not in news.text
    assert "Exception ignored" not in news.text
    ((mails, twice),) = re.findall(r"^the SMTP server has accepted (\d+) mails: (\d+) twice$", news.text, re.MULTILINE)
    return int(mails), int(twice)


def test_what_is_broken_off_leaves_no_process_and_goes_on_at_the_next_start(tmp_path: Path) -> None:
    arguments = ["--recipients", 1000, "--directory", tmp_path]
    accepted = tmp_path / "accepted"
    with program(NEWSLETTER, tmp_path, *arguments) as news:
        assert eventually(lambda: accepted.exists() and accepted.stat().st_size > 0)
        assert news.is_gone_after(signal.SIGKILL) == -signal.SIGKILL
    assert accepted.read_text().count("\n") < 900
    with program(NEWSLETTER, tmp_path, *arguments) as news:
        mails, twice = ends_well(news)
    assert mails - twice == 900
    assert twice <= 1


def test_nothing_is_left_where_no_directory_is_named(tmp_path: Path) -> None:
    with program(NEWSLETTER, tmp_path, "--recipients=100") as news:
        assert ends_well(news) == (90, 0)
    assert re.search(r"^chunks made .* 100% .*\n^mails sent .* 100% ", news.text, re.MULTILINE)
    assert not [*tmp_path.iterdir()]
