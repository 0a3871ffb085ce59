"""The application of docs/recipes/fastapi.md, under uvicorn, with jobs that end when the test says so."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.place import Place, refuses

APP = "fastapi_app:app"


@pytest.fixture(autouse=True)
def folder(place: Place) -> None:
    """What a user has copied from the page, and beside it what has its jobs wait for the tests."""
    shutil.copy(ROOT / "examples" / "fastapi_jobs" / "main.py", place.folder)
    shutil.copy(Path(__file__).with_name("fastapi_app.py"), place.folder)


def post(url: str) -> tuple[int, Any]:
    answer = httpx.post(url, timeout=LIMIT)
    return answer.status_code, answer.json()


def jobs(place: Place) -> list[str]:
    """What the jobs have written down."""
    lines: Any = place.client.lrange("jobs", 0, -1)
    return [line.decode() for line in lines]


def let_end(place: Place, *shops: str) -> None:
    """Let jobs end, and wait until all keys are free."""
    for shop in shops:
        place.client.rpush(f"let {shop} end", "now")
    assert eventually(lambda: not [*place.client.scan_iter("only_one:*")])


def test_a_double_click_starts_one_job(place: Place) -> None:
    with place.serving(APP, "--workers", "2") as (url, _), ThreadPoolExecutor(8) as pool:
        (status, job), *others = sorted(pool.map(post, [f"{url}/reports/tea"] * 8), key=lambda answer: answer[0])
        assert status == 202
        assert others == [(409, {"detail": "is running already", **job})] * 7
        refused = "INFO:only_one:main.report did not run: only_one:report:tea is taken by main.report, pid "
        assert place.log("uvicorn").count(refused) == 7
        # The response has been sent, and the job goes on: it has the key. Another job is not held up.
        holder = place.holder("only_one:report:tea")
        assert holder is not None
        assert holder.id == job["job"]
        assert post(f"{url}/reports/coffee")[0] == 202
        let_end(place, "tea", "coffee")
        assert sorted(jobs(place)) == ["coffee begins", "coffee ends", "tea begins", "tea ends"]
        status, again = post(f"{url}/reports/tea")
        assert (status, again["job"] != job["job"]) == (202, True)
        let_end(place, "tea")


def test_a_shutdown_waits_for_the_job_and_a_job_that_is_cut_off_blocks_no_next_one(place: Place) -> None:
    """Told to end soon, uvicorn ends by the signal itself, and need not have left time for the key to be released."""
    with place.serving(APP) as (url, process):
        assert post(f"{url}/reports/tea")[0] == 202
        process.terminate()
        assert eventually(lambda: refuses(url))
        assert place.client.exists("only_one:report:tea")
        let_end(place, "tea")
        assert process.wait(LIMIT) in {0, -signal.SIGTERM}
    assert jobs(place) == ["tea begins", "tea ends"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        with place.serving(APP, "--timeout-graceful-shutdown", "1") as (url, process):
            assert post(f"{url}/reports/tea")[0] == 202
            process.send_signal(number)
            assert process.wait(LIMIT) == -number
        if number == signal.SIGKILL:
            assert 0 < place.client.pttl("only_one:report:tea") <= 30_000
    with place.serving(APP) as (url, _):
        assert post(f"{url}/reports/tea")[0] == 202
        let_end(place, "tea")
