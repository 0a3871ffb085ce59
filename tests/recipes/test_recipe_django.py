"""The project of docs/recipes/django.md, copied into an empty folder, with a real worker and a real ASGI server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

import httpx
import pytest
from redis import Redis

from only_one.lock.holder import Holder
from only_one.testing import Guarded, redis_server
from rigs.waiting import LIMIT, eventually
from tests.recipes.serving import serving

ROOT = Path(__file__).parents[2]

CACHE, BROKER, LOCKS = 0, 1, 2
"""The databases of the project."""

PATIENT = f"""
from config.settings import *

CELERY_ONLY_ONE_REDIS += "?socket_timeout={LIMIT}&socket_connect_timeout={LIMIT}"
"""
"""The settings as they are, for a slow machine."""

DJANGO_REDIS = f"""
from config.settings import *


def locks():
    from django_redis import get_redis_connection

    return get_redis_connection("locks")


more = {{"SOCKET_TIMEOUT": {LIMIT}, "SOCKET_CONNECT_TIMEOUT": {LIMIT}}}
more["CONNECTION_POOL_KWARGS"] = {{"max_connections": 2}}
CACHES["locks"] = {{"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{{REDIS}}/3", "OPTIONS": more}}
CELERY_ONLY_ONE_REDIS = locks
"""
"""A function that returns a client of django-redis, whose pool is as small as can be."""

IN_THE_CACHE = DJANGO_REDIS.replace('("locks")', '("default")')

NOTHING = """
from config.settings import *

del CELERY_ONLY_ONE_REDIS
"""
"""Nothing is said: the keys are where the broker is."""


class Handler(BaseHTTPRequestHandler):
    """Serves a feed when the test says so."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, FeedServer)
        server.asked.set()
        if server.answers.wait(10 * LIMIT):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<feed/>")

    def log_message(self, *_: object) -> None:
        """It is not of interest."""


class FeedServer(ThreadingHTTPServer):
    """A server of one feed.

    Attributes:
        url: of the feed.
        asked: somebody has asked for it.
        answers: those who ask are answered.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/feed.xml"
        self.asked, self.answers = Event(), Event()


@pytest.fixture
def feed() -> Iterator[FeedServer]:
    with FeedServer() as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.answers.set()
        server.shutdown()


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url.removesuffix("/0")


@pytest.fixture
def databases(server_url: str) -> Iterator[list[Redis]]:
    """A client of each database, all of them empty."""
    clients = [Redis.from_url(f"{server_url}/{number}") for number in range(4)]
    clients[0].flushall()
    yield clients
    for each in clients:
        each.close()


class Project:
    """The project in a folder, with settings of its own."""

    def __init__(self, folder: Path, redis: str, settings: str) -> None:
        self.folder = folder
        (folder / "config" / "of_the_test.py").write_text(settings)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        of_test = {"DJANGO_SETTINGS_MODULE": "config.of_the_test", "REDIS": redis, "PYTHONPATH": path}
        self.env = {**os.environ, **of_test}

    def manage(self, *arguments: str, **env: str) -> str:
        """What a command of the project says."""
        command = [sys.executable, "-W", "error", "manage.py", *arguments]
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def worker(self) -> Iterator[Guarded]:
        """A worker with two processes."""
        log = self.folder / "worker.log"
        command = [sys.executable, "-m", "celery", "-A", "config", "worker", "-l", "INFO", "-c", "2"]
        with (
            log.open("wb") as output,
            Guarded(command, cwd=self.folder, env=self.env, stdout=output, stderr=output) as process,
        ):
            yield process
        print(log.read_text()[-5000:])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has copied from the page, with its tables."""
    folder = tmp_path_factory.mktemp("django") / "project"
    shutil.copytree(ROOT / "examples" / "django_feeds", folder, ignore=shutil.ignore_patterns("__pycache__"))
    made = Project(folder, "redis://127.0.0.1:1", PATIENT)
    made.manage("makemigrations", "feeds")
    made.manage("migrate")
    return folder


@pytest.fixture
def folder(tmp_path: Path, template: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(template, tmp_path / "project"))


def keys(client: Redis) -> list[str]:
    """The keys that are held."""
    return sorted(key.decode() for key in client.scan_iter("only_one:*"))


def test_the_task_from_queued_to_finished(
    folder: Path, server_url: str, databases: list[Redis], feed: FeedServer
) -> None:
    """The two commands of the page, a worker, and what comes after."""
    ours = Project(folder, server_url, PATIENT)
    first = ours.manage("import_feeds", feed.url)
    task_id = first.split()[-1]
    assert first == f"{feed.url}: queued as task {task_id}\n"
    assert ours.manage("import_feeds") == f"{feed.url}: a duplicate of task {task_id}\n"
    (key,) = keys(databases[LOCKS])
    assert key.startswith("only_one:feeds.tasks.import_feed-lock-")
    assert [keys(databases[number]) for number in (CACHE, BROKER)] == [[], []]

    with ours.worker():
        assert feed.asked.wait(LIMIT)
        running = Holder.parse(databases[LOCKS].get(key) or b"")
        assert running is not None
        assert (running.state, running.task_id) == ("running", task_id)
        assert ours.manage("import_feeds") == f"{feed.url}: a duplicate of task {task_id}\n"
        feed.answers.set()
        assert eventually(lambda: keys(databases[LOCKS]) == [])
        document = "from feeds.models import Feed; print(repr(Feed.objects.get().document))"
        assert ours.manage("shell", "-c", document).splitlines()[-1] == "'<feed/>'"
        again = ours.manage("import_feeds")
        assert again.startswith(f"{feed.url}: queued as task ")
        assert task_id not in again
        assert eventually(lambda: keys(databases[LOCKS]) == [])


@pytest.mark.parametrize(
    ("settings", "number"),
    [(PATIENT, LOCKS), (DJANGO_REDIS, 3), (NOTHING, BROKER)],
    ids=["URL", "django-redis", "the broker's"],
)
def test_an_async_view_and_where_its_keys_are(
    folder: Path, server_url: str, databases: list[Redis], feed: FeedServer, settings: str, number: int
) -> None:
    ours = Project(folder, server_url, settings)
    ours.manage("import_feeds", feed.url)
    (queued,) = keys(databases[number])

    async def get(url: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=10 * LIMIT) as http:
            return await http.get(url)

    async def get_all(url: str) -> tuple[list[httpx.Response], list[str]]:
        """One is answered when the feed is; the others are not held up until then."""
        asked = [asyncio.create_task(get(url)) for _ in range(20)]
        done, others = set[asyncio.Task[httpx.Response]](), set(asked)
        while len(others) > 1:
            more, others = await asyncio.wait(others, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
            assert more
            done |= more
        held = keys(databases[number])
        feed.answers.set()
        done |= {*others} and (await asyncio.wait(others, timeout=LIMIT))[0]
        return [each.result() for each in done], held

    with serving("config.asgi:application", ours.folder, ours.env) as (url, _):
        answers, held = asyncio.run(get_all(f"{url}/feeds/1/preview/"))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 19
    assert {answer.text for answer in answers} == {"<feed/>", "is being fetched already"}
    assert len(held) == 2
    assert held[1].startswith("only_one:preview-")
    assert keys(databases[number]) == [queued]
    assert sum(len(keys(each)) for each in databases) == 1


def test_a_post_with_the_csrf_cookie_of_the_page(
    folder: Path, server_url: str, databases: list[Redis], feed: FeedServer
) -> None:
    """Both are what the client says; without them the view is not reached."""
    ours = Project(folder, server_url, PATIENT)
    task_id = ours.manage("import_feeds", feed.url).split()[-1]
    page = (ROOT / "docs" / "recipes" / "django.md").read_text()
    (token,) = re.findall("^token=(.*)$", page, re.MULTILINE)
    with serving("config.asgi:application", ours.folder, ours.env) as (url, _):
        path = f"{url}/feeds/1/import/"
        assert httpx.post(path, timeout=LIMIT).status_code == 403
        headers = {"Cookie": f"csrftoken={token}", "X-CSRFToken": token}
        answer = httpx.post(path, headers=headers, timeout=LIMIT)
    assert (answer.status_code, answer.json()) == (202, {"task_id": task_id, "is_duplicate": True})
    assert len(keys(databases[LOCKS])) == 1


@pytest.mark.parametrize("settings", [PATIENT, IN_THE_CACHE], ids=["a database of their own", "that of the cache"])
def test_clearing_the_cache(
    folder: Path, server_url: str, databases: list[Redis], feed: FeedServer, settings: str
) -> None:
    """Which empties a database, keys of ours included."""
    ours = Project(folder, server_url, settings)
    number = LOCKS if settings == PATIENT else CACHE
    ours.manage("import_feeds", feed.url)
    held = keys(databases[number])
    assert len(held) == 1
    ours.manage("shell", "-c", "from django.core.cache import cache; cache.clear()")
    assert keys(databases[number]) == (held if settings == PATIENT else [])


def test_the_tests_of_the_project_need_no_server(folder: Path) -> None:
    ours = Project(folder, "redis://127.0.0.1:1", PATIENT)
    said = ours.manage("test", DJANGO_SETTINGS_MODULE="config.test_settings")
    assert "Ran 3 tests in " in said
    assert "\nOK\n" in said
