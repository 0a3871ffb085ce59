"""docs/recipes/one-running-one-waiting.md: what becomes of five calls, on a real worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.recipes import one_running_one_waiting as example
from rigs.waiting import LIMIT, eventually
from tests.live.workers import sender
from tests.recipes.helpers import Shop, SlowFile, shop


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """That of the example, as of its worker."""
    for variable in ("ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    return "only_one:"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Shop]:
    with shop(example.__name__, tmp_path) as place, place.worker("worker", 3), sender(example.app, place.url):
        yield place


def catalogues(folder: Path) -> tuple[SlowFile, SlowFile, SlowFile]:
    """One that is read, one that is not, and the newest."""
    return SlowFile(folder / "first"), SlowFile(folder / "dropped"), SlowFile(folder / "newest")


def test_below_each_call_is_a_message_and_the_newest_runs(place: Shop, tmp_path: Path) -> None:
    first, dropped, newest = catalogues(tmp_path)
    running = example.rebuild_index.delay(first.path)
    assert eventually(first.is_read)
    waiting = []
    for each in (dropped, dropped, newest, newest):
        waiting.append(example.rebuild_index.delay(each.path))
        place.wait_for("worker", rf"rebuild_index\[{waiting[-1].id}\] received", 2)  # once more, as it was requeued
    assert len({each.id for each in waiting}) == 4
    assert [each.get(timeout=LIMIT) for each in waiting[:-1]] == [None, None, None]
    assert {each.state for each in waiting[:-1]} == {"SUCCESS"}
    assert not waiting[-1].ready()
    first.give("tea\n")
    assert running.get(timeout=LIMIT) == 1
    newest.give("tea\nmugs\n")
    assert waiting[-1].get(timeout=LIMIT) == 2
    assert not dropped.is_read()


@pytest.mark.usefixtures("place")
def test_above_a_call_that_equals_the_waiting_one_is_not_published(tmp_path: Path) -> None:
    first, dropped, newest = catalogues(tmp_path)
    running = example.rebuild_search.delay(first.path)
    assert eventually(first.is_read)
    older, again = [example.rebuild_search.delay(dropped.path) for _ in range(2)]
    assert (older == again, older.is_duplicate, again.is_duplicate) == (True, False, True)
    waiting, repeated = [example.rebuild_search.delay(newest.path) for _ in range(2)]
    assert (waiting == repeated, waiting.is_duplicate, repeated.is_duplicate) == (True, False, True)
    assert older.get(timeout=LIMIT) is None
    assert not waiting.ready()
    first.give("tea\n")
    assert running.get(timeout=LIMIT) == 1
    newest.give("tea\nmugs\n")
    assert waiting.get(timeout=LIMIT) == 2
    assert not dropped.is_read()
