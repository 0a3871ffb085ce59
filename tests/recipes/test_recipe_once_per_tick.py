"""docs/recipes/once-per-tick.md: two real beats, as on two hosts, and a real worker."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

from redis import Redis

from only_one.lock.holder import Holder
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.helpers import shop, shown_in

EXAMPLE = "examples.recipes.once_per_tick"
HOSTS = ("host-1", "host-2")


def test_of_two_hosts_one_reports(tmp_path: Path) -> None:
    (skip,) = shown_in("once-per-tick.md")
    with shop(EXAMPLE, tmp_path) as place, place.worker("worker", 1), ExitStack() as stack:
        # One process, so the second tick of a minute comes when the run of the first has ended.
        for host in HOSTS:
            log = stack.enter_context((tmp_path / host).open("wb"))
            command = [sys.executable, "-m", "celery", "-A", EXAMPLE, "beat", "-l", "INFO", "--pidfile", ""]
            command += ["--schedule", str(tmp_path / f"schedule of {host}")]
            stack.enter_context(Guarded(command, cwd=ROOT, env=place.env, stdout=log, stderr=log))
        for host in HOSTS:
            place.wait_for(host, "Sending due task report")
        assert eventually(lambda: re.search(f"^{skip}$", place.log("worker"), re.MULTILINE), 2 * LIMIT)
        place.wait_for("worker", "succeeded in .*'reported'")
        with Redis.from_url(place.url) as client:
            value, milliseconds = client.get("only_one:report"), client.pttl("only_one:report")
        holder = Holder.parse(value or b"")
        assert holder is None or (holder.state == "kept" and 0 < milliseconds <= 50_000)
