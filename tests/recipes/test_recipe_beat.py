"""docs/recipes/beat.md: a real beat and a real worker say what the page shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.helpers import shop, shown_in

EXAMPLE = "examples.recipes.beat"
TICKS = 6
SCHEDULES = {"stock": "count_stock", "prices": "import_prices", "reminders": "send_reminders"}
SENT = "Sending due task {} "
RECEIVED = r"Task {}\[\S+\] received"


def test_beat_and_worker_say_what_the_page_shows(tmp_path: Path) -> None:
    patterns = shown_in("beat.md")
    assert len(patterns) == 4
    command = [sys.executable, "-m", "celery", "-A", EXAMPLE, "beat", "-l", "INFO", "--pidfile", ""]
    command += ["--schedule", str(tmp_path / "schedule")]
    with shop(EXAMPLE, tmp_path) as place, place.worker("worker", 4), (tmp_path / "beat").open("wb") as log:
        with Guarded(command, cwd=ROOT, env=place.env, stdout=log, stderr=log):

            def is_said(pattern: str) -> bool:
                return bool(re.search(f"^{pattern}$", place.log("beat") + place.log("worker"), re.MULTILINE))

            for pattern in patterns:
                assert eventually(lambda: is_said(pattern), 2 * LIMIT), pattern  # noqa: B023 - called at once
            for schedule in SCHEDULES:
                place.wait_for("beat", SENT.format(schedule), TICKS)
            # The signal that ends beat may come in a finalizer of Celery's, of which Python then prints a traceback.
            assert "Traceback" not in place.log("beat")
        sent = place.log("beat")
        # Beat may have been ended between a line and its tick.
        ticks = {schedule: len(re.findall(SENT.format(schedule), sent)) - 1 for schedule in SCHEDULES}
        skipped = {schedule: len(re.findall(f"{task} did not run", sent)) for schedule, task in SCHEDULES.items()}
        for schedule, task in SCHEDULES.items():
            place.wait_for("worker", RECEIVED.format(task), ticks[schedule] - skipped[schedule])
        received = place.log("worker")

    assert skipped["stock"] == 0
    for schedule in ("prices", "reminders"):
        task = SCHEDULES[schedule]
        assert skipped[schedule] > 0
        assert len(re.findall(RECEIVED.format(task), received)) <= ticks[schedule] + 1 - skipped[schedule]
        assert f"{task} did not run" not in received
    errors = [line for line in sent.splitlines() if "ERROR" in line]
    assert {line.split(" task ", 1)[1].split(":")[0] for line in errors} == {"reminders"}
