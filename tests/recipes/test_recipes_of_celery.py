"""docs/recipes/beat.md, and what celery-singleton's README promises of its examples, kept by examples/singleton.py.

What becomes of keys when runs return, fail or are killed is in `tests/live/test_ends.py`.
"""

from __future__ import annotations

import re

import pytest

from examples import singleton as example
from only_one import AlreadyRunning
from tests.live.workers import sender
from tests.recipes.place import Place, shown_in

SCHEDULES = {"stock": "count_stock", "prices": "import_prices", "reminders": "send_reminders"}
SENT = "Sending due task {} "


def test_beat_and_worker_say_what_the_page_shows(place: Place) -> None:
    with place.worker("examples.recipes.beat", 4):
        with place.running("beat", "celery", "-A", "examples.recipes.beat", "beat", "-l", "INFO", "--pidfile", ""):
            for schedule in SCHEDULES:
                place.wait_for("beat", SENT.format(schedule), 6)
            place.wait_for("beat", "did not run", 2)
            place.wait_for("beat", "ERROR")
            # Once it is ended, Celery's beat may find its schedule closed in the middle of a tick, and log that.
            errors = [line for line in place.log("beat").splitlines() if "ERROR" in line]
        sent = place.log("beat")
        skips = {task: len(re.findall(f"{task} did not run", sent)) for task in SCHEDULES.values()}
        for schedule, task in SCHEDULES.items():
            ticks = len(re.findall(SENT.format(schedule), sent)) - 1  # beat may have been ended between line and tick
            place.wait_for("worker", rf"Task {task}\[\S+\] received", ticks - skips[task])
        received = place.log("worker")

    for pattern in shown_in("beat.md"):
        assert re.search(f"^{pattern}$", sent + received, re.MULTILINE), pattern
    assert {task for task, number in skips.items() if number} == {"import_prices", "send_reminders"}
    assert {*re.findall(r"(\w+) did not run", received)} == {"count_stock"}
    assert not [line for line in errors if " task reminders:" not in line]


def test_the_examples_of_celery_singleton(place: Place) -> None:
    with sender(example.app, place.url):
        first, export = example.render.delay(1, 2, 3, paper="A4"), example.export.delay("bob")
        digest, failing = example.send_digest.delay("bob", reason=99), example.rebuild.delay("")
        others = [example.render.delay(4, paper="A4"), example.send_digest.delay("ann")]
        assert len({each.id for each in (first, export, digest, failing, *others)}) == 6
        again = example.render.apply_async((1, 2, 3), {"paper": "A4"})
        assert again == first
        assert type(again) is type(first)
        # There, one that leaves an argument out of the call is a KeyError.
        assert digest == example.send_digest.delay(user="bob") == example.send_digest.delay("bob", 100)
        assert failing == example.rebuild.delay("")
        with pytest.raises(AlreadyRunning, match=export.id) as caught:
            example.export.delay("bob")
        assert caught.value.task_id == export.id
