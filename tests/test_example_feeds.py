"""The demo is what `make demo` shows, and its witness sees what the lock is there to prevent."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from examples.feeds.journal import read
from examples.feeds.picture import problem
from tests.programs import program

DEMO = "examples.feeds"
GOOD = [
    (0.0, "tick", 1), (0.1, "start", 1), (1.0, "tick", 1), (1.1, "skip", 1), (1.9, "kill", 1),
    (2.0, "tick", 1), (4.0, "start", 2), (5.5, "end", 2),
]  # fmt: skip
Lines = list[tuple[float, str, int]]


def total(text: str) -> list[int]:
    """The ticks, runs, skips and overlaps that a picture tells."""
    (found,) = re.findall(r"total +(\d+) ticks, (\d+) runs, (\d+) skips, (\d+) overlaps", text)
    return [int(number) for number in found]


def test_nothing_overlaps_and_without_the_lock_the_witness_sees_that_it_does(tmp_path: Path) -> None:
    """Two demos at once, because each of them mostly waits."""
    locked, bare = tmp_path / "locked", tmp_path / "bare"
    for folder in (locked, bare):
        folder.mkdir()
    with program(DEMO, locked, "--duration=8") as ours, program(DEMO, bare, "--duration=8", ONLY_ONE_ACTIVE="0") as its:
        assert ours.wait() == 0, ours.text
        assert its.wait() == 1, its.text
    ticks, runs, skips, overlaps = total(ours.text)
    assert (ticks, overlaps) == (runs + skips, 0)
    assert not [*locked.iterdir()]
    assert total(its.text)[3] > 0
    assert "failed: two runs overlapped" in its.text


def test_nothing_outlives_a_demo_that_is_broken_off(tmp_path: Path) -> None:
    """Nor one that is killed, as the newsletter is in `test_example_newsletter.py`."""
    with program(DEMO, tmp_path) as demo:
        assert demo.is_gone_after(signal.SIGINT) == 128 + signal.SIGINT
        assert "interrupted: everything that was started has been ended." in demo.text
    assert not [*tmp_path.iterdir()]


def test_a_worker_that_dies_is_a_failure(tmp_path: Path) -> None:
    with program(DEMO, tmp_path) as demo:
        demo.kill_worker()
        assert demo.wait() == 1
    assert "failed: the worker ended early, with status -9" in demo.text


def good(without: str = "", *more: tuple[float, str, int]) -> Lines:
    """A journal as it should be, changed a little."""
    return [*(line for line in GOOD if line[1] != without), *more]


@pytest.mark.parametrize(
    ("lines", "overlaps", "reason"),
    [
        (good(), 0, None),
        (good("skip"), 0, "nothing was skipped"),
        (good("kill"), 1, "two runs overlapped"),
        (good("kill", (1.9, "end", 1)), 0, "no import was killed and made again"),
        (good("", (3.0, "tick", 1)), 0, "not every tick became a run or a skip"),
        (good("", (4.1, "start", 3), (4.2, "end", 3), (4.3, "start", 3), (6.0, "end", 3)), 2, "two runs overlapped"),
    ],
)
def test_the_verdict_of_a_journal_and_the_overlaps_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Lines, overlaps: int, reason: str | None
) -> None:
    monkeypatch.setenv("DEMO_DIRECTORY", str(tmp_path))
    written = [json.dumps([100 + after, kind, "feed", pid]) for after, kind, pid in lines]
    (tmp_path / "journal").write_text("\n".join([*written, '[109.0, "ti']))  # the last one is half written
    row = read(["feed"])["feed"]
    assert len(row.overlaps) == overlaps
    assert problem({"feed": row}) == reason
