"""With `rpc://` as result backend: who gets the result of a duplicate, and who is told that it cannot be had."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import TimeoutError as CeleryTimeoutError

from rigs.waiting import LIMIT
from tests.live import app as live
from tests.live.workers import ROOT, Scene, World

FOR_EVER = 2
"""Seconds for which it is waited for what never comes."""

IN_ANOTHER_PROCESS = """
import sys
from celery.exceptions import TimeoutError
from tests.live.app import unique

answer = unique.delay(sys.argv[1])
print(answer.is_duplicate, answer.id, flush=True)
sys.stdin.readline()  # the task has ended
try:
    answer.get(timeout=float(sys.argv[2]))
except TimeoutError:
    print("nothing")
"""


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return {"result_backend": "rpc://"}


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker(pool="threads"):
        yield


def test_only_the_first_get_of_the_process_that_has_queued_the_task_has_a_result(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    first, duplicate = (live.unique.delay(scene.key, "gate", "done") for _ in range(2))
    assert live.unique.delay(scene.key).is_duplicate
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{first.id} was queued already"]
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, scene.key, str(FOR_EVER)]
    pipes: dict[str, Any] = dict.fromkeys(["stdin", "stdout"], subprocess.PIPE)
    with subprocess.Popen(command, cwd=ROOT, env=scene.place.environment, text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"True {first.id}\n"
        scene.open()
        assert duplicate == first
        assert duplicate.get(timeout=LIMIT) == "done"
        with pytest.raises(CeleryTimeoutError):
            first.get(timeout=FOR_EVER)
        assert other.communicate("ended\n", timeout=LIMIT)[0] == "nothing\n"
