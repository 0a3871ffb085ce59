"""Two versions in one fleet: each reads what a worker of the other has stored and sent."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import redelivery_app as live
from tests.live.workers import ROOT, answered, kill_tree, world

FIRST = "04414cc"
"""The commit from which on values and headers are read by other versions."""

IN_FOLDER = ["sh", "-c", 'cd "$0" && exec "$@"']


@pytest.fixture(scope="module")
def first_version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the code of the first version."""
    git, folder = shutil.which("git"), tmp_path_factory.mktemp("first_version")
    if git is None:
        pytest.skip("git is not installed")
    command = [git, "archive", "--output", str(folder / "code.zip"), FIRST]
    archived = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if archived.returncode:
        pytest.skip(f"the history has no commit {FIRST}: {archived.stderr}")
    shutil.unpack_archive(folder / "code.zip", folder)
    return folder


@pytest.mark.parametrize("is_upgrade", [True, False], ids=["upgrade", "downgrade"])
def test_a_redelivery_to_a_worker_of_another_version(first_version: Path, tmp_path: Path, *, is_upgrade: bool) -> None:
    """It waits for a run that lives, is dropped when that has ended, and does the work of a run that was killed."""
    folders = [first_version, ROOT] if is_upgrade else [ROOT, first_version]
    lives, killed = (f"gate-{uuid4().hex}" for _ in range(2))
    with world(live.app, "tests.live.redelivery_app", tmp_path) as place:
        with place.worker("-c", "2", inside=[*IN_FOLDER, str(folders[0])]) as before:
            answers = {gate: live.late.delay(gate, "return") for gate in (lives, killed)}
            for gate in answers:
                place.wait_for("begin", gate)
            assert answered(live.app.control.cancel_consumer, "celery")
            copies = {gate: place.broker.copy_of(answer.id) for gate, answer in answers.items()}
            with place.worker("-c", "2", inside=[*IN_FOLDER, str(folders[1])]):
                place.broker.deliver_again(copies[lives])
                place.wait_for("received", lives, 3)
                place.client.rpush(lives, "open")
                assert answers[lives].get(timeout=LIMIT) == "run 1"
                assert eventually(lambda: f"[{answers[lives].id}] dropped: its run has ended" in place.log())
                kill_tree(before)
                place.broker.deliver_again(copies[killed])
                assert answers[killed].get(timeout=LIMIT) == "run 2"
        assert len(place.notes("begin", lives)) == 1
        assert len(place.notes("begin", killed)) == 2
