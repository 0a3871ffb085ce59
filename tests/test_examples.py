"""The examples run: the demo is what `make demo` shows, and its witness sees what the lock is there to prevent."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen
from xml.etree import ElementTree as ET

import feedparser
import pytest
from rich.console import Console

from examples.feeds import __main__ as feeds
from examples.feeds import journal, store
from examples.feeds.feed_server import FEEDS, Feed, document, feed_server
from examples.feeds.history import History
from examples.feeds.journal import Line, Reader, note, witnessed
from examples.feeds.summary import problem, report
from examples.feeds.timeline import LABEL_WIDTH, Picture
from examples.feeds.timeline_svg import SECOND, draw
from examples.newsletter import __main__ as newsletter
from rigs.waiting import LIMIT, eventually

ROOT = Path(__file__).parents[1]
DEMO = [sys.executable, "-m", "examples.feeds"]

# The demo as a whole


class Demo:
    """A demo that runs, and what it has printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], line: int) -> None:
        self.process = process
        self.line = line
        self.raw = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # what a terminal says when its last process is gone
            while data := os.read(self.line, 65536):
                self.raw += data.decode(errors="replace")

    @property
    def text(self) -> str:
        """What it has printed, without the terminal's escape sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw)

    def wait_for(self, pattern: str) -> None:
        """Wait until something has been printed."""
        assert eventually(lambda: re.search(pattern, self.text)), self.text[-4000:]

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        status = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return status


@contextmanager
def demo(directory: Path, *arguments: str, terminal: bool = False, **environment: str) -> Iterator[Demo]:
    """Start the demo, in a terminal of 80 columns or in none; its files are in `directory`."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 80, 0, 0))
    process = subprocess.Popen(
        [*DEMO, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "TERM": "xterm-256color",
            "PYTHONIOENCODING": "utf-8",
            "TMPDIR": str(directory),
            "DEMO_PATIENCE": "20",
            **environment,
        },
        stdin=theirs if terminal else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=_take_terminal if terminal else None,  # noqa: PLW1509 - it does one system call
    )
    os.close(theirs)
    try:
        yield Demo(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def processes() -> dict[int, tuple[int, str]]:
    """The living processes: the parent and the command line of each."""
    command = ["ps", "-axww", "-o", "pid=,ppid=,stat=,command="]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [line.split(maxsplit=3) for line in listing.stdout.splitlines()]
    return {int(pid): (int(ppid), command) for pid, ppid, stat, command in rows if not stat.startswith("Z")}


def descendants(ancestor: int) -> dict[int, str]:
    """The command lines of all processes that a process has started, directly or not."""
    everybody = processes()
    found: dict[int, str] = {}
    generation = {ancestor}
    while generation:
        generation = {pid for pid, (parent, _) in everybody.items() if parent in generation}
        found |= {pid: everybody[pid][1] for pid in generation}
    return found


def all_gone(pids: Sequence[int]) -> bool:
    """Whether all of these processes end."""
    return eventually(lambda: not processes().keys() & set(pids), pause=0.1)


def worker_of(run: Demo) -> dict[int, str]:
    """What the demo has started by the time when it has started its worker, which is waited for."""
    assert eventually(lambda: has_worker(run.process.pid), pause=0.2), run.text
    return descendants(run.process.pid)


def has_worker(pid: int) -> bool:
    """Whether a process has started a worker."""
    return any(is_worker(command) for command in descendants(pid).values())


def is_worker(command: str) -> bool:
    """Whether it is a process of the worker."""
    return "celery" in command and " worker" in command


def numbers(text: str) -> dict[str, list[int]]:
    """The summary's table: ticks, runs, skips and overlaps of each row."""
    lines = re.findall(r"^(\S+) +(\d+) +(\d+) +(\d+) +(\d+)\s*$", text, re.MULTILINE)
    return {name: [int(cell) for cell in cells] for name, *cells in lines}


def test_nothing_overlaps_and_without_the_lock_the_witness_sees_that_it_does(tmp_path: Path) -> None:
    """Two demos at once, as each of them mostly waits."""
    folders = tmp_path / "locked", tmp_path / "bare"
    for folder in folders:
        folder.mkdir()
    options = ["--duration", "10", "--workers", "4"]
    with demo(folders[0], *options) as run, demo(folders[1], *options, terminal=True, ONLY_ONE_ACTIVE="0") as bare:
        nothing_overlapped(run)
        overlaps_were_seen(bare)
    assert list(folders[0].iterdir()) == []
    assert (next(folders[1].glob("only_one-demo-*")) / "worker.log").exists()


def nothing_overlapped(run: Demo) -> dict[str, list[int]]:
    """Look at what a demo has shown, and the killed feed again; returns its table."""
    assert run.wait() == 0, run.text
    table = numbers(run.text)
    assert list(table) == ["planet.atom", "news.rss", "SingleTask", "nightly-report", "total"]
    for ticks, runs, skips, overlaps in table.values():
        assert ticks == runs + skips
        assert runs > 0
        assert overlaps == 0
    *rows, total = table.values()
    assert total == [sum(column) for column in zip(*rows, strict=True)]
    recovery = re.search(r"Killed: (\S+); started again after (\S+) s, imported again after (\S+) s\.", run.text)
    assert recovery is not None, run.text
    assert recovery[1] in {"planet.atom", "news.rss"}
    assert 0 <= float(recovery[2]) < float(recovery[3])
    assert f"{recovery[1]:{LABEL_WIDTH}}  killed: process" in run.text
    assert "\x1b" not in run.raw
    return table


def overlaps_were_seen(bare: Demo) -> None:
    """Look at what a demo without the lock has shown in a terminal."""
    assert bare.wait() == 1, bare.text
    assert "failed: " in bare.text
    assert "Traceback" not in bare.text
    assert "━" in bare.text
    assert numbers(bare.text)["total"][3] > 0


@pytest.mark.soak
def test_the_demo_takes_half_a_minute_and_each_row_has_runs_and_skips(
    tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    begin = time.monotonic()
    with demo(tmp_path, "--duration", "10", "--workers", "4", DEMO_PATIENCE="1") as run:
        table = nothing_overlapped(run)
    seconds = time.monotonic() - begin
    record_property("demo, seconds", seconds)
    assert seconds < 30
    for _, runs, skips, _ in table.values():
        assert runs > 1
        assert skips > 1


def test_ctrl_c_ends_everything_and_says_so(tmp_path: Path) -> None:
    with demo(tmp_path, terminal=True) as run:
        run.wait_for("news.rss .*━")
        children = worker_of(run)
        os.write(run.line, b"\x03")
        status = run.wait()
    assert status == 130
    assert run.text.splitlines()[-1] == "interrupted: everything that was started has been ended."
    assert "Traceback" not in run.text
    assert all_gone([*children])
    assert list(tmp_path.iterdir()) == []


def test_nothing_outlives_a_demo_that_is_killed(tmp_path: Path) -> None:
    with demo(tmp_path) as run:
        run.wait_for("news.rss +running")
        children = worker_of(run)
        run.process.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL
    assert all_gone([*children])
    assert not [command for _, command in processes().values() if str(tmp_path) in command]


@pytest.mark.parametrize("program", [feeds, newsletter])
def test_one_that_is_told_to_end_ends_as_by_ctrl_c(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an exception that nothing catches; what becomes of the processes is shown by Ctrl-C."""

    def told_to_end(*_: object) -> None:
        handler: Any = signal.getsignal(signal.SIGTERM)
        handler(signal.SIGTERM, None)

    monkeypatch.setattr(program, "main", told_to_end)
    monkeypatch.setattr(sys, "argv", ["program"])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as raised:
            program._run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert raised.value.code == 128 + signal.SIGTERM


def test_a_worker_that_dies_is_a_failure_that_shows_its_log(tmp_path: Path) -> None:
    with demo(tmp_path) as run:
        started = worker_of(run)
        for pid, command in started.items():
            if is_worker(command):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1
    last = run.text.splitlines()[-1]
    assert (found := re.fullmatch(r"failed: the worker ended early, with status 137 \(logs: (.+)\)", last)), run.text
    assert (Path(found[1]) / "worker.log").exists()
    assert all_gone([*started])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--duration", "5"], "5 is not between 10 and 28"),
        (["--duration", "29"], "29 is not between 10 and 28"),
        (["--duration", "nan"], "nan is not between 10 and 28"),
        (["--duration", "soon"], "invalid number value: 'soon'"),
        (["--workers", "3"], "3 is not between 4 and 8"),
        (["--workers", "9"], "9 is not between 4 and 8"),
        (["--workers", "4.5"], "invalid number value: '4.5'"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--picture", "nowhere/at/all.svg"], "nowhere/at/all.svg is not a file in a directory that is there"),
        (["--picture", "."], ". is not a file in a directory that is there"),
    ],
)
def test_wrong_arguments_are_told_before_anything_starts(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as raised:
        feeds._run()
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


# The witness

BEGIN = 100.0


def history(*lines: tuple[float, str, int]) -> History:
    """A history of one row, from moments after its first tick, kinds and processes."""
    told = History(["feed"])
    for after, kind, pid in lines:
        told.add(Line(BEGIN + after, kind, "feed", pid))
    return told


@pytest.mark.parametrize(
    ("lines", "overlaps"),
    [
        ([(0, "start", 1), (1, "end", 1), (1, "start", 2), (2, "end", 2)], 0),
        ([(0, "start", 1), (1, "start", 2), (2, "end", 1), (3, "end", 2)], 1),
        ([(0, "start", 1), (1, "start", 2), (2, "end", 2), (3, "end", 1)], 1),
        ([(0, "start", 1), (1, "start", 2), (2, "end", 2), (3, "start", 2), (4, "end", 2), (5, "end", 1)], 2),
        ([(0, "start", 1), (1, "kill", 1), (2, "start", 2), (3, "end", 2)], 0),
        ([(0, "start", 1), (2, "kill", 1), (1, "start", 2), (3, "end", 2)], 1),
        ([(0, "start", 1), (9, "start", 2), (10, "end", 2)], 1),
        ([(0, "start", 1), (1, "fail", 1), (2, "start", 1), (3, "end", 1)], 0),
    ],
)
def test_overlaps_are_counted_by_start_and_end(lines: list[tuple[float, str, int]], overlaps: int) -> None:
    assert len(history(*lines).rows["feed"].overlaps) == overlaps


GOOD = [
    (0.0, "tick", 1), (0.1, "start", 1), (1.0, "tick", 1), (1.1, "skip", 1), (1.5, "kill", 1),
    (2.0, "tick", 1), (4.0, "start", 2), (5.5, "end", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("without", "more", "reason"),
    [
        ([], [], None),
        (["skip"], [], "nothing was skipped"),
        (["kill"], [], "two runs overlapped"),
        (["kill"], [(1.5, "end", 1)], "no import was killed in the middle"),
        ([], [(1.6, "end", 1)], "no import was killed in the middle"),
        (["end"], [], "the killed feed was not imported again"),
        (["end"], [(5.5, "fail", 2)], "a run failed"),
        ([], [(5.0, "start", 3), (6.0, "end", 3)], "two runs overlapped"),
    ],
)
def test_the_verdict(without: list[str], more: list[tuple[float, str, int]], reason: str | None) -> None:
    lines = [line for line in GOOD if line[1] not in without]
    assert problem(history(*lines, *more)) == reason


def test_the_summary_gives_the_numbers() -> None:
    text = report(history(*GOOD), entries=12)
    assert numbers(text) == {"feed": [3, 2, 1, 0], "total": [3, 2, 1, 0]}
    assert "Ticks: all of them became a run or a skip." in text
    assert "Killed: feed; started again after 2.5 s, imported again after 4.0 s." in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((3.0, "tick", 1), "Ticks: NOT all of them became a run or a skip."),
        ((3.0, "lost", 1), "feed: 1 times the key was lost, or the server not there."),
    ],
)
def test_the_summary_says_what_does_not_add_up(line: tuple[float, str, int], said: str) -> None:
    assert said in report(history(*GOOD, line), entries=12)


def test_the_journal_is_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    reader = Reader()
    assert reader.read() == []
    with witnessed("feed"):
        assert [(line.kind, line.row, line.pid) for line in reader.read()] == [("start", "feed", os.getpid())]
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"at": 1, "kind": "end", "row"')
        file.flush()
        assert [line.kind for line in reader.read()] == ["end"]
        file.write(b': "feed", "pid": 7}\n')
    assert reader.read() == [Line(1, "end", "feed", 7)]


def test_a_run_that_fails_is_witnessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    reader = Reader()
    with pytest.raises(KeyError), witnessed("feed"):
        raise KeyError
    assert [line.kind for line in reader.read()] == ["start", "fail"]


def test_lines_of_many_processes_stay_whole(tmp_path: Path) -> None:
    program = "from examples.feeds.journal import note\nfor _ in range(200): note('tick', 'x' * 500)"
    environment = {**os.environ, "DEMO_DIRECTORY": str(tmp_path)}
    writers = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment) for _ in range(2)]
    assert [writer.wait(LIMIT) for writer in writers] == [0] * 2
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 400
    assert {len(line) for line in lines} <= {len(lines[0]) + difference for difference in range(-20, 21)}


# The picture


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_the_picture_fits_and_shows_each_state(width: int, *, ascii_only: bool) -> None:
    lines = [*GOOD, (5.2, "start", 3), (6.5, "fail", 3)]
    console = Console(width=width, file=StringIO())
    picture = Picture("title", 20, ascii_only=ascii_only)
    with console.capture() as captured:
        console.print(picture.draw(history(*lines), [Line(BEGIN + 1, "skip", "feed", 1)], BEGIN + 7, width))
    text = captured.get()
    assert all(len(line) <= width for line in text.splitlines())
    row = next(line for line in text.splitlines() if line.startswith("feed"))
    for glyph in "=xKF!" if ascii_only else "━\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}KF!":
        assert glyph in row
    assert row.split()[-2:] == ["3", "1"]
    assert text.isascii() == ascii_only


SVG = "{http://www.w3.org/2000/svg}"


def shapes(picture: ET.Element, style: str) -> list[ET.Element]:
    """The shapes of a class in the rows; the last one is the legend's, if the legend has it."""
    return [each for each in picture.iter() if each.get("class") == style]


def words(picture: ET.Element) -> list[str]:
    """All that can be read in a picture."""
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_the_picture_for_a_page_shows_runs_skips_and_the_kill() -> None:
    lines = [*GOOD, (4.5, "skip", 2), (6.0, "start", 1), (7.0, "fail", 1)]
    picture = ET.fromstring(draw(history(*lines)))  # noqa: S314 - our own file
    (killed, _), (again, _), (failed,) = (shapes(picture, style) for style in ("killed", "again", "failed"))
    left, right = (float(killed.get("x", "")), float(again.get("x", "")))
    assert right - left == pytest.approx(3.9 * SECOND)
    assert float(killed.get("width", "")) == pytest.approx(1.4 * SECOND)
    assert float(failed.get("x", "")) > right + float(again.get("width", ""))
    assert len(shapes(picture, "run")) == 1  # the legend's
    (skips, _) = shapes(picture, "skip")
    assert skips.get("d", "").count("M") == 2
    assert len(shapes(picture, "overlap")) == 1
    assert shapes(picture, "number")[0].text == "1"
    said = words(picture)
    assert "3 calls of 1 keys: 3 runs, 2 skips, 0 overlaps" in said
    assert "kill -9 of process 1: the next run of feed begins 2.5 s later" in said
    assert {"feed", "0 s", "6 s", "8 s"} <= set(said)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "0 calls of 1 keys: 0 runs, 0 skips, 0 overlaps"),
        ([(0, "tick", 1), (0, "start", 1), (1, "start", 2)], "1 calls of 1 keys: 2 runs, 0 skips, 1 overlaps"),
        ([(0, "tick", 1), (0, "start", 1), (1, "kill", 1)], "kill -9 of process 1"),
    ],
)
def test_the_picture_for_a_page_of_what_was_broken_off(lines: list[tuple[float, str, int]], said: str) -> None:
    picture = ET.fromstring(draw(history(*lines)))  # noqa: S314 - our own file
    assert said in words(picture)
    overlaps = sum(kind == "start" for _, kind, _ in lines[2:])
    assert len(shapes(picture, "overlap")) == overlaps + 1


def test_the_picture_of_the_documentation_is_of_a_demo_that_went_well() -> None:
    file = ROOT / "docs" / "timeline.svg"
    assert file.stat().st_size < 60_000
    picture = ET.parse(file).getroot()  # noqa: S314 - our own file
    title = picture.findtext(f"{SVG}title", "")
    found = re.fullmatch(r"(\d+) calls of 6 keys: (\d+) runs, (\d+) skips, 0 overlaps", title)
    assert found, title
    calls, runs, skips = map(int, found.groups())
    assert calls == runs + skips
    assert any(re.match(r"kill -9 of process \d+: the next run of \S+ begins", line) for line in words(picture))


# The feeds


@pytest.mark.parametrize("feed", FEEDS, ids=lambda feed: feed.name)
def test_a_feed_is_stored_once_however_often_it_is_imported(
    feed: Feed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    body = document(feed.name)
    assert feedparser.parse(body).version == ("rss20" if feed.name.endswith(".rss") else "atom10")
    assert [store.save("url", body) for _ in range(2)] == [12, 12]
    assert store.count() == [("url", 12)]


def test_an_update_changes_the_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    store.save("url", document("a.rss", 1))
    store.save("url", document("a.rss", 1).replace(b"Entry 0", b"News"))
    with store.transaction() as database:
        assert database.execute("SELECT title FROM entry").fetchall() == [("News",)]


def test_what_is_not_a_feed_is_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    with pytest.raises(ValueError, match="url is not a feed"):
        store.save("url", b"<html>Not found</html>")
    assert store.count() == []


@pytest.mark.parametrize("name", ["a.atom", "a.rss"])
def test_only_the_newest_entries_are_kept(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    store.save("url", document(name, 12))
    store.prune(keep=2)
    with store.transaction() as database:
        kept = database.execute("SELECT title, updated FROM entry ORDER BY updated").fetchall()
    assert kept == [("Entry 10", "2024-01-01T00:10:00Z"), ("Entry 11", "2024-01-01T00:11:00Z")]


def test_the_server_is_slow_and_serves_what_it_has() -> None:
    with feed_server(1) as (url,):
        begin = time.monotonic()
        with urlopen(url, timeout=LIMIT) as answer:  # noqa: S310 - our own server
            body = answer.read()
        assert body == document(FEEDS[0].name)
        assert time.monotonic() - begin >= FEEDS[0].drip
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"{url}.gone", timeout=LIMIT)  # noqa: S310 - our own server


def test_the_demo_writes_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    note("tick", "feed")
    assert journal.directory() == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
