"""The demo is what `make demo` shows, and its witness sees what the lock is there to prevent."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from rigs.waiting import LIMIT, eventually
from tests.programs import program

DEMO = "examples.feeds"


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
        assert ours.wait(2 * LIMIT) == 0, ours.text
        assert its.wait(2 * LIMIT) == 1, its.text
    ticks, runs, skips, overlaps = total(ours.text)
    assert (ticks, overlaps) == (runs + skips, 0)
    assert not [*locked.iterdir()]
    assert total(its.text)[3] > 0
    assert "failed: two runs overlapped" in its.text


def test_a_demo_that_is_broken_off_ends_what_it_has_started(tmp_path: Path) -> None:
    """That its commands end even if it is killed is in `test_testing.py`."""
    with program(DEMO, tmp_path) as demo:
        assert eventually(lambda: [*tmp_path.glob("*/worker.log")])
        demo.send_signal(signal.SIGINT)
        assert demo.wait(2 * LIMIT) == 128 + signal.SIGINT
        assert "interrupted: everything that was started has been ended." in demo.text
    assert not [*tmp_path.iterdir()]
