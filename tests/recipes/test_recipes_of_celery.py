"""docs/recipes/beat.md, and what celery-singleton's README promises of its examples, kept by examples/singleton.py.

What is compared is queued before there is a worker, so nothing depends on how long anything takes.
What becomes of keys when workers are killed is in `tests/live/test_ends.py`.
"""

from __future__ import annotations

import re

import pytest

from examples import singleton as example
from only_one import AlreadyRunning
from rigs.waiting import LIMIT
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


def test_the_examples_of_celery_singleton_on_a_real_worker(place: Place) -> None:
    with sender(example.app, place.url):
        calls = [
            example.render.delay(1, 2, 3, paper="A4"),
            example.render.delay(4, paper="A4"),
            example.send_digest.delay("bob", reason=99),
            example.send_digest.delay("ann"),
            example.export.delay("bob"),
            example.rebuild.delay(""),
        ]
        assert len({each.id for each in calls}) == len(calls)
        first, _, digest, _, export, failing = calls
        again = example.render.apply_async((1, 2, 3), {"paper": "A4"})
        assert again == first
        assert type(again) is type(first)
        # There, one that leaves an argument out of the call is a KeyError.
        assert digest == example.send_digest.delay(user="bob") == example.send_digest.delay("bob", 100)
        assert failing == example.rebuild.delay("")
        with pytest.raises(AlreadyRunning, match=export.id) as caught:
            example.export.delay("bob")
        assert caught.value.task_id == export.id
        with place.worker("examples.singleton", 3, SINGLETON_URL=place.url):
            assert first.get(timeout=LIMIT) == again.get(timeout=LIMIT) == "3 pages, {'paper': 'A4'}"
            assert digest.get(timeout=LIMIT) == "digest for bob, because of 99"
            with pytest.raises(ValueError, match="which index"):
                failing.get(timeout=LIMIT)
            assert example.render.delay(1, 2, 3, paper="A4") != first
            assert example.rebuild.delay("") != failing
            reminder = example.remind.delay("bob")
            assert reminder.get(timeout=LIMIT) == "bob was reminded"
            assert example.remind.delay("bob") == reminder
