"""The application of docs/recipes/fastapi.md, under uvicorn, with jobs that end when the test says so."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from only_one.lock.holder import Holder
from only_one.testing import Guarded, redis_server
from rigs.waiting import LIMIT, eventually
from tests.recipes.serving import refuses, serving

ROOT = Path(__file__).parents[2]
CLICKS = 8


@contextmanager
def uvicorn(folder: Path, redis_url: str, *options: str) -> Iterator[tuple[str, Guarded]]:
    """The application under uvicorn, for the length of a `with` block; gives its address, and its process."""
    patient = f"{redis_url}?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
    env = {**os.environ, "ONLY_ONE_REDIS_URL": patient, "PYTHONPATH": str(ROOT)}
    with serving("fastapi_app:app", folder, env, *options) as served:
        yield served


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as found:
        found.flushdb()
        yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has copied from the page, and beside it what has its jobs wait for the tests."""
    path = tmp_path_factory.mktemp("fastapi")
    shutil.copy(ROOT / "examples" / "fastapi_jobs" / "main.py", path)
    shutil.copy(Path(__file__).with_name("fastapi_app.py"), path)
    return path


@pytest.fixture(scope="module")
def hosts(folder: Path, redis_url: str) -> Iterator[list[str]]:
    """The addresses of a server with two worker processes, and of another one."""
    with uvicorn(folder, redis_url, "--workers", "2") as (several, _), uvicorn(folder, redis_url) as (one, _):
        yield [several, one]


def post(*urls: str) -> list[httpx.Response]:
    """Send requests at the same time, each on a connection of its own."""

    async def send(url: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=LIMIT) as http:
            return await http.post(url)

    async def send_all() -> list[httpx.Response]:
        return await asyncio.gather(*map(send, urls))

    return asyncio.run(send_all())


def jobs(client: Redis) -> list[str]:
    """What the jobs have written down."""
    lines: Any = client.lrange("jobs", 0, -1)
    return [line.decode() for line in lines]


def test_a_double_click_starts_one_job(client: Redis, hosts: list[str], folder: Path) -> None:
    answers = post(*(f"{hosts[number % 2]}/reports/tea" for number in range(CLICKS)))
    first, *others = sorted(answers, key=lambda answer: answer.status_code)
    assert [first.status_code, *(other.status_code for other in others)] == [202] + [409] * (CLICKS - 1)
    job = first.json()
    assert {*job} == {"job", "since"}
    assert [other.json() for other in others] == [{"detail": "is running already", **job}] * (CLICKS - 1)

    logs = "".join((folder / f"uvicorn-{httpx.URL(host).port}.log").read_text() for host in hosts)
    refused = "INFO:only_one:main.report did not run: only_one:report:tea is taken by main.report, pid "
    assert logs.count(refused) == CLICKS - 1

    # The response has been sent, and the job goes on: it has the key.
    holder = Holder.parse(client.get("only_one:report:tea") or b"")
    assert holder is not None
    assert holder.id == job["job"]
    assert datetime.fromisoformat(job["since"]) == datetime.fromtimestamp(holder.since, timezone.utc)
    assert eventually(lambda: jobs(client) == ["tea begins"])
    (coffee,) = post(f"{hosts[0]}/reports/coffee")  # another job, which is not held up
    assert coffee.status_code == 202

    client.rpush("let tea end", "now")
    client.rpush("let coffee end", "now")
    assert eventually(lambda: not client.exists("only_one:report:tea", "only_one:report:coffee"))
    assert sorted(jobs(client)) == ["coffee begins", "coffee ends", "tea begins", "tea ends"]
    (again,) = post(f"{hosts[1]}/reports/tea")
    assert again.status_code == 202
    assert again.json()["job"] != job["job"]
    client.rpush("let tea end", "now")
    assert eventually(lambda: not client.exists("only_one:report:tea"))


def test_a_background_task_alone_acquires_the_key_after_the_response(client: Redis, hosts: list[str]) -> None:
    (first,) = post(f"{hosts[0]}/later/tea")
    assert (first.status_code, first.json()) == (202, [])
    assert eventually(lambda: jobs(client) == ["tea begins"])
    assert client.exists("only_one:later:tea")
    (second,) = post(f"{hosts[1]}/later/tea")
    assert (second.status_code, second.json()) == (202, ["only_one:later:tea"])
    # Its job does not run; it has been skipped by the time a later one of the same process has ended.
    client.rpush("let coffee end", "now")
    post(f"{hosts[1]}/later/coffee")
    assert eventually(lambda: "coffee ends" in jobs(client))
    assert jobs(client).count("tea begins") == 1
    client.rpush("let tea end", "now")
    assert eventually(lambda: not client.exists("only_one:later:tea"))
    assert jobs(client).count("tea ends") == 1


def test_a_decorated_endpoint_does_not_guard_its_background_tasks(client: Redis, hosts: list[str]) -> None:
    for _ in range(2):
        (answer,) = post(f"{hosts[0]}/endpoints/tea")
        assert (answer.status_code, answer.json()) == (202, ["only_one:endpoint:tea"])
    assert eventually(lambda: jobs(client) == ["tea begins"] * 2)
    assert not client.exists("only_one:endpoint:tea")
    client.rpush("let tea end", "now", "now")
    assert eventually(lambda: jobs(client).count("tea ends") == 2)


def test_a_job_is_waited_for_when_the_server_is_told_to_end(client: Redis, redis_url: str, folder: Path) -> None:
    with uvicorn(folder, redis_url) as (url, process):
        assert post(f"{url}/reports/tea")[0].status_code == 202
        process.send_signal(signal.SIGTERM)
        assert eventually(lambda: refuses(url))
        assert client.exists("only_one:report:tea")
        client.rpush("let tea end", "now")
        assert process.wait(LIMIT) in {0, -signal.SIGTERM}
    assert jobs(client) == ["tea begins", "tea ends"]
    assert not client.exists("only_one:report:tea")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end soon"])
def test_a_job_that_is_cut_off_blocks_no_next_one_on_its_host(
    client: Redis, redis_url: str, folder: Path, hosts: list[str], number: int
) -> None:
    """Told to end soon, uvicorn ends by the signal itself, and need not have left time for the key to be released."""
    with uvicorn(folder, redis_url, "--timeout-graceful-shutdown", "1") as (url, process):
        assert post(f"{url}/reports/tea")[0].status_code == 202
        assert eventually(lambda: jobs(client) == ["tea begins"])
        process.send_signal(number)
        assert process.wait(LIMIT) == -number
    if number == signal.SIGKILL:
        assert 0 < client.pttl("only_one:report:tea") <= 30_000
    (answer,) = post(f"{hosts[0]}/reports/tea")
    assert answer.status_code == 202
    client.rpush("let tea end", "now")
    assert eventually(lambda: not client.exists("only_one:report:tea"))
    assert jobs(client) == ["tea begins", "tea begins", "tea ends"]
