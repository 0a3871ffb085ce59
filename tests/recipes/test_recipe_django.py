"""The project of docs/recipes/django.md, copied into an empty folder, with a real worker and a real ASGI server."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.place import PAGES, Place

_, _, LOCKS, OTHER_CACHE = range(4)
"""The databases of the project."""

PATIENT = f'CELERY_ONLY_ONE_REDIS += "?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"'
DJANGO_REDIS = f"""
def locks():
    from django_redis import get_redis_connection

    return get_redis_connection("locks")


more = {{"SOCKET_TIMEOUT": {LIMIT}, "SOCKET_CONNECT_TIMEOUT": {LIMIT}}}
more["CONNECTION_POOL_KWARGS"] = {{"max_connections": 2}}
CACHES["locks"] = {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{{REDIS}}/3", "OPTIONS": more}}
CELERY_ONLY_ONE_REDIS = locks
"""
"""A function that returns a client of django-redis, whose pool is as small as can be."""

QUEUES = "from feeds.tasks import import_feed as f; f.delay(1); assert f.delay(1).is_duplicate"


class Feed:
    """A web server with one feed, which is answered when the test says so."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(LIMIT)
        self._listener = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/feed.xml"

    def wait_for_request(self) -> None:
        self._connection, _ = self._listener.accept()

    def answer(self) -> None:
        with self._connection as connection:
            assert connection.recv(65536).startswith(b"GET /feed.xml ")
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n<feed/>")


@pytest.fixture
def feed() -> Iterator[Feed]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Feed(listener)


def manage(place: Place, *arguments: str, **env: str) -> str:
    """What a command of the project says."""
    done = place.run(sys.executable, "-W", "error", "manage.py", *arguments, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new project, into which a user has copied what is on the page."""
    without_server: Any = None
    place = Place("redis://127.0.0.1:1", without_server, tmp_path_factory.mktemp("project"))
    assert place.run(sys.executable, "-m", "django", "startproject", "config", ".").returncode == 0
    source = ROOT / "examples" / "django_feeds"
    shutil.copytree(source, place.folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    manage(place, "makemigrations", "feeds", REDIS=place.url)
    manage(place, "migrate", REDIS=place.url)
    return place.folder


@pytest.fixture
def project(place: Place, copied: Path) -> Place:
    """That project, with its own database and server."""
    shutil.copytree(copied, place.folder, dirs_exist_ok=True)
    place.env["REDIS"] = place.url.removesuffix("/0")
    for name in ("ONLY_ONE_REDIS_URL", "CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"):
        del place.env[name]
    return place


def keys(place: Place) -> list[tuple[int, str]]:
    """The keys that are held, each with its database."""
    found = []
    for number in range(4):
        with Redis.from_url(f"{place.env['REDIS']}/{number}") as client:
            found += [(number, key.decode()) for key in client.scan_iter("only_one:*")]
    return sorted(found, key=lambda each: each[1])


def use(project: Place, setting: str) -> None:
    """Have the project take its keys where this setting says."""
    (project.folder / "config" / "of_the_test.py").write_text(f"from config.settings import *\n{setting}")
    project.env["DJANGO_SETTINGS_MODULE"] = "config.of_the_test"


def test_a_function_that_returns_the_client_of_a_cache_says_where_the_keys_are(project: Place) -> None:
    use(project, DJANGO_REDIS)
    manage(project, "shell", "-c", QUEUES)
    assert [database for database, _ in keys(project)] == [OTHER_CACHE]


def test_the_commands_the_views_and_the_worker(project: Place, feed: Feed) -> None:
    use(project, PATIENT)
    (task_id,) = re.findall(
        f"^{feed.url}: queued as task (.*)$", manage(project, "import_feeds", feed.url), re.MULTILINE
    )
    duplicate = manage(project, "import_feeds")
    assert f"{feed.url}: a duplicate of task {task_id}\n" in duplicate
    assert "\nfeeds.tasks.import_feed did not run: only_one:feeds.tasks.import_feed-lock-" in duplicate
    ((number, key),) = keys(project)
    assert number == LOCKS
    assert key.startswith("only_one:feeds.tasks.import_feed-lock-")

    (token,) = re.findall("^token=(.*)$", (PAGES / "django.md").read_text(), re.MULTILINE)
    headers = {"Cookie": f"csrftoken={token}", "X-CSRFToken": token}
    with project.serving("config.asgi:application") as (url, _), ThreadPoolExecutor(1) as pool:
        assert httpx.post(f"{url}/feeds/1/import/", timeout=LIMIT).status_code == 403
        answer = httpx.post(f"{url}/feeds/1/import/", headers=headers, timeout=LIMIT)
        assert (answer.status_code, answer.json()) == (202, {"task_id": task_id, "is_duplicate": True})
        first = pool.submit(httpx.get, f"{url}/feeds/1/preview/", timeout=10 * LIMIT)
        feed.wait_for_request()
        assert [(each, name.partition("-")[0]) for each, name in keys(project)] == [
            (number, "only_one:feeds.tasks.import_feed"),
            (number, "only_one:preview"),
        ]
        others = [httpx.get(f"{url}/feeds/1/preview/", timeout=LIMIT) for _ in range(5)]
        feed.answer()
        assert (first.result(LIMIT).status_code, first.result().text) == (200, "<feed/>")
    assert {(other.status_code, other.text) for other in others} == {(409, "is being fetched already")}
    assert keys(project) == [(number, key)]

    with project.running("worker", "celery", "-A", "config", "worker", "-l", "INFO", "-c", "2"):
        feed.wait_for_request()
        assert keys(project) == [(number, key)]
        feed.answer()
        project.wait_for("worker", "succeeded in")
        assert eventually(lambda: keys(project) == [])
    document = "from feeds.models import Feed; print(repr(Feed.objects.get().document))"
    assert manage(project, "shell", "-c", document).splitlines()[-1] == "'<feed/>'"


def test_the_tests_of_the_project_need_no_server(project: Place) -> None:
    said = manage(project, "test", DJANGO_SETTINGS_MODULE="config.test_settings", REDIS="redis://127.0.0.1:1")
    assert "Ran 3 tests in " in said
    assert "\nOK\n" in said
