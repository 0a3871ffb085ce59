"""docs/recipes/beat.md and once-per-tick.md: real beats and real workers say what the pages show."""

from __future__ import annotations

import re

from tests.recipes.place import Place, shown_in

SCHEDULES = {"stock": "count_stock", "prices": "import_prices", "reminders": "send_reminders"}
SENT = "Sending due task {} "
RECEIVED = r"Task {}\[\S+\] received"


def test_beat_and_worker_say_what_the_page_shows(place: Place) -> None:
    patterns = shown_in("beat.md")
    assert len(patterns) == 4
    with place.worker("examples.recipes.beat", 4):
        with place.beat("examples.recipes.beat"):
            for schedule in SCHEDULES:
                place.wait_for("beat", SENT.format(schedule), 6)
            place.wait_for("beat", "did not run", 2)
        sent = place.log("beat")
        # Beat may have been ended between a line and its tick.
        ticks = {schedule: len(re.findall(SENT.format(schedule), sent)) - 1 for schedule in SCHEDULES}
        skipped = {schedule: len(re.findall(f"{task} did not run", sent)) for schedule, task in SCHEDULES.items()}
        for schedule, task in SCHEDULES.items():
            place.wait_for("worker", RECEIVED.format(task), ticks[schedule] - skipped[schedule])
        received = place.log("worker")

    for pattern in patterns:
        assert re.search(f"^{pattern}$", sent + received, re.MULTILINE), pattern
    assert [each > 0 for each in skipped.values()] == [False, True, True]
    for task in ("import_prices", "send_reminders"):
        assert f"{task} did not run" not in received
    errors = [line for line in sent.splitlines() if "ERROR" in line]
    assert {line.split(" task ", 1)[1].split(":")[0] for line in errors} == {"reminders"}


def test_of_two_hosts_one_reports(place: Place) -> None:
    example = "examples.recipes.once_per_tick"
    (skip,) = shown_in("once-per-tick.md")
    # One process, so the second tick of a minute comes when the run of the first has ended.
    with place.worker(example, 1), place.beat(example, "host-1"), place.beat(example, "host-2"):
        for host in ("host-1", "host-2"):
            place.wait_for(host, "Sending due task report")
        place.wait_for("worker", f"^{skip}$")
        place.wait_for("worker", "succeeded in .*'reported'")
        holder = place.holder("only_one:report")
        assert holder is None or holder.state == "kept"
