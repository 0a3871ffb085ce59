"""docs/recipes/one-running-one-waiting.md: what becomes of calls, on a real worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.recipes import one_running_one_waiting as example
from rigs.waiting import LIMIT, eventually
from tests.live.workers import sender
from tests.recipes.place import Place, SlowFile

Catalogues = tuple[SlowFile, SlowFile, SlowFile]


@pytest.fixture
def catalogues(place: Place) -> Iterator[Catalogues]:
    """One that is read, one that is not, and the newest, beside a worker."""
    with place.worker(example.__name__, 3), sender(example.app, place.url):
        first, dropped, newest = (SlowFile(place.folder / name) for name in ("first", "dropped", "newest"))
        yield first, dropped, newest
        assert not dropped.is_read()


def test_below_each_call_is_a_message_and_the_newest_runs(place: Place, catalogues: Catalogues) -> None:
    first, dropped, newest = catalogues
    running = example.rebuild_index.delay(first.path)
    assert eventually(first.is_read)
    waiting = []
    for each in (dropped, newest, newest):
        waiting.append(example.rebuild_index.delay(each.path))
        place.wait_for("worker", rf"rebuild_index\[{waiting[-1].id}\] received", 2)  # once more, as it was requeued
    assert [each.get(timeout=LIMIT) for each in waiting[:-1]] == [None, None]
    first.give("tea\n")
    newest.give("tea\nmugs\n")
    assert [running.get(timeout=LIMIT), waiting[-1].get(timeout=LIMIT)] == [1, 2]


def test_above_a_call_that_equals_the_waiting_one_is_not_published(catalogues: Catalogues) -> None:
    first, dropped, newest = catalogues
    running = example.rebuild_search.delay(first.path)
    assert eventually(first.is_read)
    older = example.rebuild_search.delay(dropped.path)
    waiting, repeated = [example.rebuild_search.delay(newest.path) for _ in range(2)]
    assert (waiting == repeated, waiting.is_duplicate, repeated.is_duplicate) == (True, False, True)
    assert older.get(timeout=LIMIT) is None
    first.give("tea\n")
    newest.give("tea\nmugs\n")
    assert [running.get(timeout=LIMIT), waiting.get(timeout=LIMIT)] == [1, 2]
