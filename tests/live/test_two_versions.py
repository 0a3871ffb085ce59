"""Two versions in one fleet: each reads what a worker of the other has stored and sent."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import ROOT, Scene, World, answered

FIRST = "04414cc"
"""The commit from which on values and headers are read by other versions."""


VISIBILITY = 0.9
"""As in the application of the first version."""


@pytest.fixture(scope="module")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder with the code of the first version."""
    git, folder = shutil.which("git"), tmp_path_factory.mktemp("first_version")
    if git is None:
        pytest.skip("git is not installed")
    # Of the whole tree, also where the tests run in a folder of the repository that has no history.
    command = [git, "--work-tree=.", "archive", "--output", str(folder / "code.zip"), FIRST]
    archived = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if archived.returncode:
        pytest.skip(f"the history has no commit {FIRST}: {archived.stderr}")
    shutil.unpack_archive(folder / "code.zip", folder)
    return str(folder)


@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "downgrade"])
def test_a_redelivery_to_a_worker_of_another_version(first_version: str, place: World, *, is_upgrade: bool) -> None:
    """It waits for a run that lives, is dropped when that has ended, and does the work of a run that was killed."""
    earlier: Any = {
        "folder": first_version,
        "module": "tests.live.redelivery_app",
        "LIVE_RESULTS": place.server.url,
    }
    versions: list[Any] = [earlier, {}] if is_upgrade else [{}, earlier]
    lives, killed = Scene(place), Scene(place)
    with place.worker("-c", "2", **versions[0]) as before:
        answers = [live.redelivered.delay(each.key, "return") for each in (lives, killed)]
        for each in (lives, killed):
            each.begun()
        assert answered(live.app.control.cancel_consumer, "celery")
        copies = [place.broker.copy_of(answer.id) for answer in answers]
        with place.worker("-c", "2", **versions[1]):
            place.broker.deliver_again(copies[0])
            place.wait_for("received", lives.key, 3)
            for gate in (lives.key, f"gate:{lives.key}"):  # of the first version's run, and of this one's
                place.client.rpush(gate, "open")
            assert answers[0].get(timeout=LIMIT)
            assert eventually(lambda: f"[{answers[0].id}] dropped: its run has ended" in place.log())
            before.kill_all()
            place.broker.deliver_again(copies[1])
            assert answers[1].get(timeout=LIMIT)
    assert len(place.notes("begin", lives.key)) == 1
    assert len(place.notes("begin", killed.key)) == 2
