"""The newsletter's parts, each by itself; what it does as a whole is in `tests/live/test_newsletter.py`."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from aiosmtpd.smtp import SMTP, Envelope, Session

from examples.newsletter import __main__ as newsletter
from examples.newsletter import journal, making, places, recipients, sending, spool
from examples.newsletter.journal import Journal
from examples.newsletter.letter import BadRecipientError, Letter
from examples.newsletter.people import EXCLUDE, FIRST, INCLUDE, LAST, PERIOD, crowd, is_chosen
from examples.newsletter.recipients import CHOSEN, Mailing, Recipient
from examples.newsletter.spool import Entry
from examples.newsletter.summary import ACCEPTED, accepted
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually
from tests.programs import descendants, is_worker, processes

ROOT = Path(__file__).parents[1]
NEWSLETTER = [sys.executable, "-m", "examples.newsletter"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(places.DIRECTORY, str(tmp_path))
    return tmp_path


@pytest.fixture
def mailing(folder: Path) -> Mailing:  # noqa: ARG001 - where it is
    recipients.add(crowd(30))
    return recipients.register("spring", INCLUDE, EXCLUDE, 10)


# Who gets it


def test_who_is_chosen_has_a_tag_to_include_and_none_to_exclude_and_has_not_unsubscribed(mailing: Mailing) -> None:
    numbers = range(1, mailing.last + 1)
    found = [each.id for number in range(mailing.chunks) for each in recipients.chunk(mailing, number)]
    assert found == [number for number in numbers if is_chosen(number)]
    assert len(found) == recipients.count(mailing) == 30
    assert len(found) < mailing.last


def test_tags_and_unsubscribing_by_hand(folder: Path) -> None:  # noqa: ARG001
    people = {
        "in": (False, ["a"]),
        "both": (False, ["a", "b"]),
        "excluded": (False, ["a", "x"]),
        "other": (False, ["c"]),
        "nothing": (False, []),
        "unsubscribed": (True, ["a", "b"]),
        "late": (False, ["b"]),
    }
    recipients.add((Recipient(n, f"{name}@x.org", name), *rest) for n, (name, rest) in enumerate(people.items(), 1))
    mailing = recipients.register("m", ["a", "b"], ["x"], 4)
    recipients.unsubscribe([7])
    assert [each.name for n in range(mailing.chunks) for each in recipients.chunk(mailing, n)] == ["in", "both"]
    assert recipients.unsubscribed(5, 7) == {6, 7}
    assert recipients.unsubscribed(1, 5) == set()


def test_people_are_added_all_or_none(folder: Path) -> None:
    assert recipients.is_empty()

    def people() -> Iterator[Any]:
        yield from crowd(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recipients.add(people())
    assert (folder / recipients.FILE).exists()
    assert recipients.is_empty()
    (folder / recipients.FILE).write_bytes(b"")
    assert recipients.is_empty()
    recipients.add(crowd(5))
    assert not recipients.is_empty()


def test_a_chunk_is_found_by_its_ids(mailing: Mailing) -> None:
    with recipients.database() as connection:
        asked = {**mailing.tags(), "after": 10, "last": 20}
        plan = "\n".join(row[-1] for row in connection.execute(f"EXPLAIN QUERY PLAN SELECT id {CHOSEN}", asked))
    assert "SEARCH recipients USING INTEGER PRIMARY KEY (rowid>? AND rowid<?)" in plan
    assert "SEARCH tags USING PRIMARY KEY (recipient=? AND tag=?)" in plan
    assert "SCAN recipients" not in plan
    assert "SCAN tags" not in plan


def test_a_mailing_stays_as_it_was_begun(mailing: Mailing) -> None:
    recipients.add([(Recipient(1000, "new@x.org", "New"), False, INCLUDE)])
    assert recipients.register("spring", INCLUDE, EXCLUDE, 10) == mailing
    with pytest.raises(ValueError, match="with another size of chunks: 10"):
        recipients.register("spring", INCLUDE, EXCLUDE, 20)
    with pytest.raises(ValueError, match="was begun with other tags"):
        recipients.register("spring", INCLUDE, [], 10)


@pytest.mark.parametrize("name", ["", "../x", "Spring", "a b", "x" * 100, "-x", "a\n"])
def test_a_name_that_is_none_for_a_file(mailing: Mailing, name: str) -> None:  # noqa: ARG001
    with pytest.raises(ValueError, match="is no name for a mailing"):
        recipients.register(name, INCLUDE, EXCLUDE, 10)


def test_other_bad_input(mailing: Mailing) -> None:  # noqa: ARG001
    with pytest.raises(ValueError, match="a chunk of 0 recipients cannot be made"):
        recipients.register("x", INCLUDE, EXCLUDE, 0)
    with pytest.raises(LookupError, match="there is no mailing called nothing"):
        recipients.mailing("nothing")


# What they get


def parsed(message: bytes) -> EmailMessage:
    found = message_from_bytes(message, policy=policy.default)
    assert isinstance(found, EmailMessage)
    return found


@pytest.mark.parametrize("number", range(1, PERIOD * 2))
def test_a_message_is_what_rfc_822_says_and_has_the_personal_fields(number: int) -> None:
    recipient = Recipient(number, f"person-{number}@example.net", f"{FIRST[number % 10]} {LAST[number % 8]}")
    raw = Letter("spring").to(recipient)
    message = parsed(raw)
    assert not message.defects
    assert b"\n" not in raw.replace(b"\r\n", b"")
    assert max(map(len, raw.split(b"\r\n"))) <= 998
    raw.partition(b"\r\n\r\n")[0].decode("ascii")
    (to,) = message["To"].addresses
    assert (to.display_name, to.addr_spec) == (recipient.name, recipient.email)
    assert message["Message-ID"] == f"<spring.{number}@example.org>"
    text, html = message.get_body(["plain"]), message.get_body(["html"])
    assert text is not None
    assert html is not None
    assert message.get_content_type() == "multipart/alternative"
    assert f"Dear {recipient.name}," in text.get_content()
    escaped = recipient.name.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert f"Dear {escaped.replace(chr(34), '&quot;').replace(chr(39), '&#x27;')}," in html.get_content()
    assert f"unsubscribe/spring/{number}" in text.get_content()


def test_each_message_is_the_same_whatever_was_made_before() -> None:
    people = [person for person, _, _ in crowd(30)]
    one, other = Letter("spring"), Letter("spring")
    forth = [one.to(each) for each in people]
    back = [other.to(each) for each in reversed(people)]
    assert forth == back[::-1]
    assert len({*forth}) == len(people)


@pytest.mark.parametrize(
    ("email", "name"),
    [
        ("a@x.org", "Eve\r\nBcc: everybody@example.org"),
        ("a@x.org", "Eve\nX: y"),
        ("a@x.org\r\nRCPT TO:<b@x.org>", "Eve"),
        ("a@x.org, b@x.org", "Eve"),
        ("nobody", "Eve"),
        ("", "Eve"),
        ("jürgen@x.org", "Eve"),
        ("a b@x.org", "Eve"),
        ("a@x.org", "Eve" * 400),
    ],
)
def test_who_cannot_be_written_to_is_named(email: str, name: str) -> None:
    with pytest.raises(BadRecipientError, match="recipient 7 cannot be written to"):
        Letter("spring").to(Recipient(7, email, name))


# A chunk's file


def test_what_is_written_is_read(mailing: Mailing) -> None:
    entries = [Entry(1, "a@x.org", b"From: x\r\n\r\n1 2 3\n"), Entry(2, "b@x.org", b""), Entry(9, "c@x.org", b"\n\n")]
    assert spool.write(mailing, 0, entries) == 3
    assert [*spool.read(mailing, 0)] == entries
    assert spool.count(mailing, 0) == 3
    assert spool.missing(mailing) == [*range(1, mailing.chunks)]
    assert spool.write(mailing, 1, []) == spool.count(mailing, 1) == 0
    assert spool.missing(mailing) == [*range(2, mailing.chunks)]


def test_a_chunk_that_breaks_off_is_not_there(mailing: Mailing) -> None:
    def entries() -> Iterator[Entry]:
        yield Entry(1, "a@x.org", b"x" * 100_000)
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        spool.write(mailing, 0, entries())
    assert 0 in spool.missing(mailing)
    killed = spool.path(mailing, 0).with_suffix(".999999.part")
    killed.write_bytes(b"half")
    other = spool.path(mailing, 1).with_suffix(".999999.part")
    other.write_bytes(b"half")
    assert making.make("spring", 0) == 8
    assert not killed.exists()
    assert other.exists()


def test_a_chunk_that_is_made_is_not_made_again(mailing: Mailing) -> None:
    assert making.make("spring", 0) == 8
    before = spool.path(mailing, 0).stat()
    assert making.make("spring", 0) == 8
    after = spool.path(mailing, 0).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


# The journal


def test_the_journal_has_what_was_noted(mailing: Mailing) -> None:
    with Journal(mailing, 1) as written:
        assert all(written.waits(recipient) for recipient in range(11, 21))
        written.note(11, journal.ACCEPTED)
        written.note(20, journal.REFUSED)
        assert not written.is_complete
    with Journal(mailing, 1) as again:
        assert [each for each in range(11, 21) if not again.waits(each)] == [11, 20]
        again.complete()
        assert again.is_complete
    assert journal.path(mailing, 1).read_bytes() == b"a........rc"
    assert [journal.count(mailing, state) for state in (journal.ACCEPTED, journal.REFUSED)] == [1, 1]


def test_a_journal_that_was_cut_off_when_it_was_begun_is_begun_anew(mailing: Mailing) -> None:
    place = journal.path(mailing, 0)
    place.parent.mkdir(parents=True)
    place.with_name(f"new-{place.name}").write_bytes(b"..")
    with Journal(mailing, 0) as written:
        assert written.waits(10)
    assert journal.count(mailing) == 0


# Sending, to a server that does not take everything


class Picky:
    """Refuses some recipients, and some messages, for good or for now."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.rules: dict[str, str] = {}

    async def handle_RCPT(  # noqa: N802
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        if (said := self.rules.get(f"to {address}")) is None:
            envelope.rcpt_tos.append(address)
        return said or "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        (address,) = envelope.rcpt_tos
        if (said := self.rules.get(f"message {address}")) is None:
            self.got.append(address)
        return said or "250 OK"


@pytest.fixture
def picky(mailing: Mailing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Picky]:
    for number in range(mailing.chunks):
        making.make("spring", number)
    handler, loop = Picky(), asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(lambda: SMTP(handler, loop=loop), "127.0.0.1", 0))
    thread = Thread(target=loop.run_forever)
    thread.start()
    monkeypatch.setenv(sending.SMTP, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    yield handler
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def deliver(check: Any = lambda: None) -> int:
    return sending.deliver("spring", check)


def address(number: int) -> str:
    return f"person-{number}@example.net"


def test_who_is_refused_for_good_is_not_tried_again(picky: Picky, mailing: Mailing) -> None:
    picky.rules = {f"to {address(3)}": "550 no such user", f"message {address(7)}": "554 too much of it"}
    assert deliver() == 28
    assert deliver() == 0
    assert len({*picky.got}) == len(picky.got) == 28
    assert not {address(3), address(7)} & {*picky.got}
    assert journal.count(mailing, journal.REFUSED) == 2


@pytest.mark.parametrize("rule", ["to", "message"])
def test_who_is_refused_for_now_is_tried_at_the_next_attempt(picky: Picky, rule: str) -> None:
    picky.rules = {f"{rule} {address(14)}": "451 come back later"}
    with pytest.raises(OSError, match="come back later"):
        deliver()
    before = [*picky.got]
    assert 0 < len(before) < 30
    picky.rules.clear()
    assert deliver() == 30 - len(before)
    assert len({*picky.got}) == len(picky.got) == 30


def test_nothing_is_sent_after_the_check_has_failed(picky: Picky) -> None:
    left = 5

    def check() -> None:
        nonlocal left
        if not left:
            raise RuntimeError
        left -= 1

    with pytest.raises(RuntimeError):
        deliver(check)
    assert len(picky.got) == 5
    assert deliver() == 25


def test_without_a_server_it_is_an_oserror(picky: Picky, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setenv(sending.SMTP, "127.0.0.1:1")
    with pytest.raises(ConnectionRefusedError):
        deliver()


# What counts


def test_the_summary_counts_what_should_not_be(mailing: Mailing, folder: Path) -> None:
    chosen, wrong = address(1), address(20)
    lines = [chosen, chosen, chosen.upper(), address(2), wrong, wrong, "stranger@x.org"]
    (folder / ACCEPTED).write_text("".join(f"{line}\n" for line in lines))
    assert accepted(mailing) == (7, 3, 3)


# The page


def test_the_page_names_tests_that_exist() -> None:
    named = re.findall(r"`(?:(tests/\S+\.py)::)?(test_\w+)`", (ROOT / "docs" / "newsletter.md").read_text())
    assert len(named) > 15
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / (file or "tests/live/test_newsletter.py")).read_text(), name


# The command line


def command_line(*arguments: object, directory: Path | None = None) -> list[str]:
    return [*map(str, arguments), *([f"--directory={directory}"] if directory else [])]


def run(*arguments: object, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [*NEWSLETTER, *command_line(*arguments, directory=directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., object]:  # noqa: ARG001 - it is put back
    """Run what ends before any process is started; returns its exit status."""

    def status(*arguments: object, directory: Path | None = None) -> object:
        monkeypatch.setattr(sys, "argv", ["newsletter", *command_line(*arguments, directory=directory)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return newsletter._run()
        except SystemExit as end:
            return end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return status


@contextmanager
def running(*arguments: object, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A newsletter that runs."""
    command = [*NEWSLETTER, *command_line(*arguments, directory=directory)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def worker_of(process: subprocess.Popen[str]) -> dict[int, str]:
    """What it has started by the time when it has started its worker, which is waited for."""
    assert eventually(lambda: has_worker(process.pid), pause=0.2)
    return descendants(process.pid)


def has_worker(pid: int) -> bool:
    """Whether a process has started a worker."""
    return any(is_worker(command) for command in descendants(pid).values())


def all_gone(pids: Sequence[int]) -> bool:
    """Whether all of these processes end."""
    return eventually(lambda: not processes().keys() & set(pids), pause=0.1)


def accepted_in(directory: Path) -> int:
    file = directory / ACCEPTED
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_one_line_for_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = run("--recipients", 300, "--chunk", 100, "--workers", 2, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    names = ["recipients", "messages", "accepted", "duplicates", "wrong", "seconds", "peak_mb"]
    assert list(found) == names
    assert [found[name] for name in names[:5]] == [300, 300, 300, 0, 0]
    assert found["seconds"] > 0
    assert found["peak_mb"] is None or 20 < found["peak_mb"] < 200
    assert re.search(r"^chunks (\d+) of \1, mails 300 of 300$", done.stderr, re.MULTILINE)
    assert "Exception ignored" not in done.stderr
    assert "Traceback" not in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_the_memory_is_that_of_the_processes_themselves() -> None:
    """Of the largest of them, and without that of whoever has started them."""
    of_ours = b"x" * 300_000_000
    largest = "of_its_own = b'x' * 100_000_000; print(flush=True); input()"
    program = f"""
import subprocess, sys
from examples.newsletter.memory import peak
with subprocess.Popen([sys.executable, "-c", {largest!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    print(peak())
    child.stdin.close()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert of_ours
    if Path("/proc/self/status").exists():
        assert 100_000_000 < int(done.stdout) < 200_000_000, done
    else:
        assert done.stdout == "None\n"


def test_what_is_broken_off_leaves_no_process_and_goes_on_at_the_next_start(
    tmp_path: Path, run_here: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    people = 2000
    made = run("--recipients", people, "--chunk", 500, "--make-only", directory=tmp_path)
    assert made.returncode == 0, made.stderr
    assert re.search(rf"^messages +{people} +made", made.stdout, re.MULTILINE)
    assert re.search(r"^accepted +0 ", made.stdout, re.MULTILINE)

    assert run_here("--recipients", 200, "--chunk", 500, directory=tmp_path) == 1
    assert f"is to {people} recipients, not to 200" in capsys.readouterr().err
    assert run_here(directory=tmp_path) == 1
    assert "with another size of chunks: 500" in capsys.readouterr().err

    for number, status in (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL):
        before = accepted_in(tmp_path)
        with running("--chunk=500", directory=tmp_path) as process:
            assert eventually(lambda: accepted_in(tmp_path) > before)  # noqa: B023 - it is called here
            started = worker_of(process)
            process.send_signal(number)
            _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == status
        assert "Traceback" not in said
        assert ("interrupted: everything that was started has been ended." in said) == (number == signal.SIGINT)
        assert all_gone([*started])
        assert accepted_in(tmp_path) < people

    again = run("--chunk=500", "--json", directory=tmp_path)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["recipients"] == people
    assert found["accepted"] - found["duplicates"] == people
    assert found["duplicates"] <= 2  # one for each time that it was broken off


def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    with running("--recipients=10", directory=tmp_path) as process:
        started = worker_of(process)
        for pid, command in started.items():
            if is_worker(command):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert said.splitlines()[-1].startswith("failed: the worker ended early, with status 137")
    assert "Exception ignored" not in said
    assert all_gone([*started])


def test_a_mailing_that_cannot_be_made_is_told_and_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEWSLETTER_RETRIES", "0")
    (tmp_path / "spring").mkdir()
    (tmp_path / "spring" / "chunks").touch()
    done = run("--recipients=10", directory=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("failed: nothing was sent, as not all chunks could be made; with --directory the next start")
    assert (tmp_path / ACCEPTED).read_text() == ""


def test_a_directory_is_for_one_at_a_time(
    tmp_path: Path, run_here: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "lock").open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run_here("--recipients=10", directory=tmp_path) == 1
    assert capsys.readouterr().err.strip() == f"failed: another newsletter is at work in {tmp_path}"


def test_a_worker_that_is_left_over_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(places.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(places, "LAST_WORKER", 0.2)
    program = (
        "import sys, time; from examples.newsletter import places; places.stay(); print(flush=True); time.sleep(99)"
    )
    with Guarded([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE) as left:
        assert left.stdout is not None
        assert left.stdout.readline()
        with pytest.raises(places.InUseError), places.house(tmp_path):
            pass
    with places.house(tmp_path) as found:
        assert found == tmp_path


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipients", "0"], "0 is not between 1 and"),
        (["--recipients", "many"], "invalid number value: 'many'"),
        (["--workers", "0"], "0 is not between 1 and 64"),
        (["--chunk", "-5"], "-5 is not between 1 and"),
        (["--colour"], "unrecognized arguments: --colour"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], said: str, run_here: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here(*arguments) == 2
    assert said in capsys.readouterr().err


def test_a_directory_that_is_none(
    tmp_path: Path, run_here: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_here(directory=tmp_path / "file") == 1
    assert capsys.readouterr().err.startswith("failed: ")
