"""docs/recipes/one-running-one-waiting.md: what becomes of calls, on a real worker."""

from __future__ import annotations

from typing import Any

from examples.recipes import one_running_one_waiting as example
from rigs.waiting import LIMIT, eventually
from tests.live.workers import sender
from tests.recipes.place import Place, SlowFile


def test_one_runs_and_of_those_that_wait_the_newest(place: Place) -> None:
    with place.worker(example.__name__, 3), sender(example.app, place.url):
        see_the_newest_run(place, example.rebuild_index, is_published_once=False)
        see_the_newest_run(place, example.rebuild_search, is_published_once=True)


def see_the_newest_run(place: Place, task: Any, *, is_published_once: bool) -> None:
    running, dropped, newest = (
        SlowFile(place.folder / f"{task.name} {name}") for name in ("running", "dropped", "newest")
    )
    results = [task.delay(running.path)]
    assert eventually(running.is_read)
    for each in (dropped, newest, newest):
        results.append(task.delay(each.path))
        place.wait_for("worker", rf"\[{results[-1].id}\] received", 2)  # once more, as it was requeued
    first, older, waiting, repeated = results
    assert (waiting == repeated) == is_published_once
    assert getattr(repeated, "is_duplicate", False) == is_published_once
    assert older.get(timeout=LIMIT) is None
    if not is_published_once:
        assert waiting.get(timeout=LIMIT) is None
    running.give("tea\n")
    newest.give("tea\nmugs\n")
    assert [first.get(timeout=LIMIT), repeated.get(timeout=LIMIT)] == [1, 2]
    assert not dropped.is_read()
