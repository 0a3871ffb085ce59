"""The scripts of docs/recipes/cron.md, copied into an empty folder and started as cron does it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from rigs.namespaces import MACHINE, unshare
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.place import PAGES, Place, shown_in

CONTAINER = unshare(*MACHINE)
REPORT = [sys.executable, "nightly_report.py"]


@pytest.fixture
def cron(place: Place) -> Place:
    """With what a user has copied from the page, and the orders of a day."""
    shutil.copytree(ROOT / "examples" / "cron", place.folder, dirs_exist_ok=True)
    (place.folder / "orders.txt").write_text("tea 3\ncoffee 5\ntea 4\n")
    return place


def test_a_run_that_goes_on_is_not_joined_by_another(cron: Place) -> None:
    with subprocess.Popen(REPORT, stdin=subprocess.PIPE, cwd=cron.folder, env=cron.env) as waiting:
        assert eventually(lambda: cron.holder("only_one:nightly-report") or waiting.poll() is not None)
        second = cron.run(*REPORT)
        waiting.kill()
    assert (second.returncode, second.stdout) == (75, "")
    assert re.fullmatch(shown_in("cron.md")[-2], second.stderr.splitlines()[-1])

    # The first one was killed while it had its key, which holds up nobody.
    (line,) = re.findall(r"(?m)^0 3 \* \* \* (.*)$", (PAGES / "cron.md").read_text())
    command = line.replace("/srv/reports", shlex.quote(str(cron.folder))).replace(".venv/bin/python", sys.executable)
    assert cron.run("sh", "-c", command).returncode == 0
    assert cron.log("report.txt") == "3 orders\n"


def test_a_server_that_is_down(cron: Place) -> None:
    done = cron.run(*REPORT, ONLY_ONE_REDIS_URL="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "LockUnavailable" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(CONTAINER is None, reason="no pid namespace can be made here")
def test_one_host_of_two_runs_per_tick(cron: Place) -> None:
    def bill_on(host: str) -> list[str]:
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', host]
        return [*(CONTAINER or []), *named, sys.executable, "two_hosts.py", "outbox"]

    both = [subprocess.Popen(bill_on(host), cwd=cron.folder, env=cron.env) for host in ("first", "second")]
    assert [each.wait(LIMIT) for each in both] == [0, 0]
    late = cron.run(*bill_on("third"))
    assert (late.returncode, late.stdout) == (0, "")
    assert re.search(" on (first|second), kept for ", late.stderr)
    assert re.fullmatch(shown_in("cron.md")[-1], late.stderr.splitlines()[-1])
    assert cron.log("outbox") == "bill of the day\n"
