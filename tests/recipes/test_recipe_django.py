"""The project of docs/recipes/django.md, copied into an empty folder, with a real worker and a real ASGI server."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from redis import Redis

from only_one.holder import Holder
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.place import PAGES, Place

CACHE, BROKER, LOCKS, OTHER_CACHE = range(4)
"""The databases of the project."""

SETTINGS = "from config.settings import *\n"
PATIENT = f'{SETTINGS}CELERY_ONLY_ONE_REDIS += "?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"'
NOTHING = f"{SETTINGS}del CELERY_ONLY_ONE_REDIS"
DJANGO_REDIS = f"""{SETTINGS}
def locks():
    from django_redis import get_redis_connection

    return get_redis_connection("locks")


more = {{"SOCKET_TIMEOUT": {LIMIT}, "SOCKET_CONNECT_TIMEOUT": {LIMIT}}}
more["CONNECTION_POOL_KWARGS"] = {{"max_connections": 2}}
CACHES["locks"] = {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{{REDIS}}/3", "OPTIONS": more}}
CELERY_ONLY_ONE_REDIS = locks
"""
"""A function that returns a client of django-redis, whose pool is as small as can be."""


class Handler(BaseHTTPRequestHandler):
    """Serves a feed when the test says so."""

    asked, answers = Event(), Event()

    def do_GET(self) -> None:
        self.asked.set()
        assert self.answers.wait(10 * LIMIT)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<feed/>")

    def log_message(self, *_: object) -> None:
        """It is not of interest."""


@pytest.fixture
def feed() -> Iterator[str]:
    """The URL of a feed."""
    for each in (Handler.asked, Handler.answers):
        each.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/feed.xml"
        Handler.answers.set()
        server.shutdown()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("django") / "project"


def manage(place: Place, *arguments: str, **env: str) -> str:
    """What a command of the project says."""
    done = place.run(sys.executable, "-W", "error", "manage.py", *arguments, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def project(place: Place, template: Path, request: pytest.FixtureRequest) -> Place:
    """What a user has copied from the page, with its tables, and settings of the test."""
    is_new = not template.exists()
    source = ROOT / "examples" / "django_feeds" if is_new else template
    shutil.copytree(source, place.folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (place.folder / "config" / "of_the_test.py").write_text(getattr(request, "param", PATIENT))
    place.env |= {"DJANGO_SETTINGS_MODULE": "config.of_the_test", "REDIS": place.url.removesuffix("/0")}
    del place.env["ONLY_ONE_REDIS_URL"], place.env["CELERY_BROKER_URL"], place.env["CELERY_RESULT_BACKEND"]
    if is_new:
        manage(place, "makemigrations", "feeds")
        manage(place, "migrate")
        shutil.copytree(place.folder, template)
    return place


def keys(place: Place) -> list[tuple[int, str]]:
    """The keys that are held, each with its database."""
    found = []
    for number in range(4):
        with Redis.from_url(f"{place.url.removesuffix('/0')}/{number}") as client:
            found += [(number, key.decode()) for key in client.scan_iter("only_one:*")]
    return sorted(found, key=lambda each: each[1])


def test_the_task_from_queued_to_finished(project: Place, feed: str) -> None:
    """The two commands of the page, a worker, and what comes after."""
    first = manage(project, "import_feeds", feed)
    task_id = first.split()[-1]
    assert first == f"{feed}: queued as task {task_id}\n"
    assert manage(project, "import_feeds") == f"{feed}: a duplicate of task {task_id}\n"
    ((_, key),) = keys(project)
    assert key.startswith("only_one:feeds.tasks.import_feed-lock-")
    with project.running("worker", "celery", "-A", "config", "worker", "-l", "INFO", "-c", "2"):
        assert Handler.asked.wait(LIMIT)
        with Redis.from_url(f"{project.url.removesuffix('/0')}/{LOCKS}") as locks:
            running = Holder.parse(locks.get(key) or b"")
        assert running is not None
        assert (running.state, running.task_id) == ("running", task_id)
        Handler.answers.set()
        assert eventually(lambda: keys(project) == [])
    document = "from feeds.models import Feed; print(repr(Feed.objects.get().document))"
    assert manage(project, "shell", "-c", document).splitlines()[-1] == "'<feed/>'"


@pytest.mark.parametrize(
    ("project", "number"),
    [
        (PATIENT, LOCKS),
        (DJANGO_REDIS, OTHER_CACHE),
        (DJANGO_REDIS.replace('("locks")', '("default")'), CACHE),
        (NOTHING, BROKER),
    ],
    ids=["URL", "django-redis", "the cache's", "the broker's"],
    indirect=["project"],
)
def test_the_views_and_where_their_keys_are(project: Place, feed: str, number: int) -> None:
    task_id = manage(project, "import_feeds", feed).split()[-1]
    ((database, queued),) = keys(project)
    assert database == number
    (token,) = re.findall("^token=(.*)$", (PAGES / "django.md").read_text(), re.MULTILINE)
    headers = {"Cookie": f"csrftoken={token}", "X-CSRFToken": token}
    with project.serving("config.asgi:application") as (url, _), ThreadPoolExecutor(1) as pool:
        assert httpx.post(f"{url}/feeds/1/import/", timeout=LIMIT).status_code == 403
        answer = httpx.post(f"{url}/feeds/1/import/", headers=headers, timeout=LIMIT)
        assert (answer.status_code, answer.json()) == (202, {"task_id": task_id, "is_duplicate": True})
        first = pool.submit(httpx.get, f"{url}/feeds/1/preview/", timeout=10 * LIMIT)
        assert Handler.asked.wait(LIMIT)
        held = keys(project)
        others = [httpx.get(f"{url}/feeds/1/preview/", timeout=LIMIT) for _ in range(5)]
        Handler.answers.set()
        assert (first.result(LIMIT).status_code, first.result().text) == (200, "<feed/>")
    assert {(other.status_code, other.text) for other in others} == {(409, "is being fetched already")}
    assert [database for database, _ in held] == [number, number]
    assert held[1][1].startswith("only_one:preview-")
    assert keys(project) == [(number, queued)]
    manage(project, "shell", "-c", "from django.core.cache import cache; cache.clear()")
    assert keys(project) == ([] if number == CACHE else [(number, queued)])


def test_the_tests_of_the_project_need_no_server(project: Place) -> None:
    said = manage(project, "test", DJANGO_SETTINGS_MODULE="config.test_settings", REDIS="redis://127.0.0.1:1")
    assert "Ran 3 tests in " in said
    assert "\nOK\n" in said
