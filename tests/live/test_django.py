"""Autodiscovered tasks of a real Django project, with settings of ours among its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from only_one.holder import Holder
from only_one.testing import redis_server
from rigs.waiting import eventually
from tests.live.workers import ROOT, Witness, celery_worker, environment


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


def test_the_tasks_of_a_django_project(url: str, tmp_path: Path) -> None:
    env = environment(url, tmp_path / "witness")
    env["DJANGO_SETTINGS_MODULE"] = "tests.live.django_site.settings"
    command = [sys.executable, "-m", "tests.live.django_site.produce", "gate"]
    produced = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert produced.returncode == 0, produced.stderr
    said = dict(line.split(": ", 1) for line in produced.stdout.splitlines())
    key = "django:tests.live.django_site.orders.tasks.ship:7"

    assert said["keys of functions"] == "['django:reindex'] ['django:reindex']"
    assert said["configured by importing and by functions"] == "False"
    assert produced.stderr.count(" ONLY_ONE_PREFIX,") == 1, produced.stderr
    assert "write CELERY_ONLY_ONE_REDIS, CELERY_ONLY_ONE_PREFIX" in produced.stderr
    assert said["has started"] == "True"
    assert said["of the one that is there"] == said["id"]
    with Redis.from_url(url) as client:
        value, milliseconds = client.get(key), client.pttl(key)
        holder = Holder.parse(value or b"")
        assert holder is not None
        assert (holder.state, holder.task_id) == ("queued", said["id"])
        assert 300_000 < milliseconds <= 600_000
        assert client.llen("django") == 1

        with celery_worker("tests.live.django_site", tmp_path / "log", env, "-Q", "django", size=1):
            assert eventually(lambda: Witness(tmp_path / "witness").lines("begun") == [["7"]])
            running = Holder.parse(client.get(key) or b"")
            assert running is not None
            assert (running.state, running.task_id) == ("running", said["id"])
            client.rpush("gate", "go")
            assert eventually(lambda: client.exists(key) == 0)
            assert eventually(lambda: client.get(f"celery-task-meta-{said['id']}") is not None)
            assert "shipped 7" in str(client.get(f"celery-task-meta-{said['id']}"))
