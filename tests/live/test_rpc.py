"""With `rpc://` as result backend: who gets the result of a duplicate, and who is told that it cannot be had."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest
import redis
from celery.exceptions import TimeoutError as CeleryTimeoutError

from only_one import configure
from only_one.testing import redis_server
from rigs.waiting import LIMIT
from tests.live import rpc_app as live
from tests.live.brokers import broker as broker_of
from tests.live.workers import BROKER, PREFIX, ROOT, URL, celery_worker, environment

FOR_EVER = 2
"""Seconds for which it is waited for what never comes."""

IN_ANOTHER_PROCESS = """
import sys
from celery.exceptions import TimeoutError
from tests.live.rpc_app import gated

answer = gated.delay(sys.argv[1])
print(answer.is_duplicate, answer.id, flush=True)
sys.stdin.readline()  # the task has ended
try:
    answer.get(timeout=float(sys.argv[2]))
except TimeoutError:
    print("nothing")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[redis.Redis, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("rpc")
    with (
        redis_server() as server,
        redis.Redis.from_url(server.url) as client,
        broker_of(client, server.url, live.app) as broker,
    ):
        live.app.conf.update({"broker_url": broker.url, **broker.settings})
        env = environment(server.url, folder / "witness", **{BROKER: broker.url})
        with celery_worker("tests.live.rpc_app", folder / "log", env, pool="threads"):
            yield client, env
        live.app.backend.result_consumer.stop()
        live.app.pool.force_close_all(close_pool=False)


@pytest.fixture(autouse=True)
def configured(place: tuple[redis.Redis, dict[str, str]]) -> Iterator[None]:
    with configure(redis=place[1][URL], prefix=PREFIX):
        yield


def test_only_the_first_get_has_a_result(
    place: tuple[redis.Redis, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = place
    gate = uuid4().hex
    first, duplicate = live.gated.delay(gate), live.gated.delay(gate)
    assert live.gated.delay(gate).is_duplicate
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{first.id} was queued already"]
    client.rpush(gate, 1)
    assert duplicate == first
    assert duplicate.get(timeout=LIMIT) == "done"
    with pytest.raises(CeleryTimeoutError):
        first.get(timeout=FOR_EVER)


def test_another_process_has_none(place: tuple[redis.Redis, dict[str, str]]) -> None:
    client, env = place
    gate = uuid4().hex
    first = live.gated.delay(gate)
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, gate, str(FOR_EVER)]
    with subprocess.Popen(
        command, cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == f"True {first.id}\n"
        client.rpush(gate, 1)
        assert first.get(timeout=LIMIT) == "done"
        said, told = other.communicate("ended\n", timeout=LIMIT)
    assert said == "nothing\n"
    assert f"{first.id} was queued already" in told
