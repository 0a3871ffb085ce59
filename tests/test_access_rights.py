"""A user of the server who may do what docs/access-rights.md says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from celery.exceptions import WorkerLostError
from celery.signals import task_failure, worker_shutdown

import only_one as only_one_package
from only_one import buffer_one, configure, current_lock, only_one
from only_one.clock import now
from only_one.connections import server as servers
from only_one.inspection import held, holder_of, key_of, release, release_key
from only_one.lock import renewal
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.token import TokenFactory
from rigs.servers import RedisServer
from rigs.waiting import LIMIT, eventually
from tests.celery.deliveries import token_of
from tests.clients import clients
from tests.decorated import call_both, decorated, decorated_async
from tests.faults.programs import Running
from tests.renewal import is_renewed

PAGE = Path(__file__).parents[1] / "docs" / "access-rights.md"
KEYS = ("~only_one:*", "~{only_one:*")


def rights(what: str) -> set[str]:
    """The commands of a row."""
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {what} |")]
    found = set(re.findall(r"`([\w\\|]+)`", row))
    return {each.replace("\\|", "|") for each in found} | (rights("functions") if "of functions" in row else set())


def add_user(client: Any, url: str, commands: set[str]) -> str:
    """A new user who may call these and nothing else; returns the URL by which it logs in."""
    name = uuid4().hex
    client.execute_command("ACL", "SETUSER", name, "on", ">secret", *KEYS, *[f"+{each}" for each in sorted(commands)])
    return url.replace("redis://", f"redis://{name}:secret@")


@pytest.fixture
def admin(own_server: RedisServer) -> Iterator[Any]:
    """A client that may do anything."""
    with redis.Redis.from_url(own_server.url) as client:
        yield client


def used(client: Any) -> set[str]:
    """The commands that the server has carried out, in scripts too, since its statistics were reset."""
    stats = client.info("commandstats")
    return {name.removeprefix("cmdstat_") for name, stat in stats.items() if stat["calls"]}


def use_functions(client: Any, url: str) -> None:
    """All that a decorated function does."""
    with Running(lease=60, timeout=600) as run:
        assert call_both() == [None, None]
        assert is_renewed(run.lock)
        assert run.lock.fence > 0
        run.lock.extend(60)
    assert run.result == "done"
    client.set("only_one:dead", TokenFactory("dead").token(None), px=600_000)
    assert decorated_async(lambda: "done", "dead", at_least=600)() == "done"
    client.set("only_one:queued", TokenFactory("a task", "its id", 0, "queued").token(600), px=600_000)
    assert decorated(lambda: "done", "queued")() == "done"
    server, key = servers.find_server(url), "only_one:left"
    client.set(key, key)
    renewal.release_later(PendingRelease(server, key, key.encode(), now() + 600, no_write_in_flight=True))
    assert eventually(
        lambda: not [each for each in list(renewal._renewer.pending_releases.values()) if each.key == key]
    )


def an_app() -> Celery:
    app = Celery("rights", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.worker_hijack_root_logger = False
    return app


def work(number: int) -> int:
    return number


def use_tasks(client: Any, _url: str) -> None:
    """What tasks do besides, in a worker and by themselves."""
    app: Any = an_app()

    queued = only_one("{number}")(app.task(work, name="queued", shared=False))
    buffered = only_one("newest", when_busy=buffer_one())(app.task(work, name="buffered", shared=False))
    late = app.task(only_one("late")(work), name="late", shared=False, acks_late=True)
    results = [queued.delay(1), queued.delay(1), buffered.delay(1), buffered.delay(1), buffered.delay(2)]
    assert results[0] == results[1]
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="WARNING"):
        assert [each.get(timeout=LIMIT) for each in results] == [1, 1, None, None, 2]
        assert late.delay(1).get(timeout=LIMIT) == 1
    worker_shutdown.send(sender=app)  # as the end of a process does

    class Renames(Task):  # type: ignore[misc]  # Celery has no types
        def __call__(self, number: int) -> Any:
            return super().__call__(-number)

    renames = app.task(only_one("{number}")(work), name="renames", shared=False, base=Renames)
    client.set("only_one:-1", token_of("its id", is_dead=True), px=600_000)
    task_failure.send(sender=renames, task_id="its id", exception=WorkerLostError(), args=(1,), kwargs={})
    assert eventually(lambda: not client.exists("only_one:-1"))


def use_inspection(client: Any, url: str) -> None:
    """All three that look and release."""
    client.set("only_one:other", "by hand")
    function = only_one(lambda: "done", key="looked-at")
    with Running("looked-at", lease=60):
        assert holder_of(function)
        assert key_of(function) == "only_one:looked-at"
        assert {each.key for each in held()} >= {"only_one:other", "only_one:looked-at"}
        assert release(function)
    assert release_key("only_one:other", "by hand", redis=url)


@pytest.mark.parametrize("use", [use_functions, use_tasks, use_inspection])
def test_the_rights_that_the_page_lists_are_enough_and_none_is_in_vain(
    own_server: RedisServer, admin: Any, use: Callable[[Any, str], None]
) -> None:
    admin.flushall()
    what = use.__name__.removeprefix("use_")
    url = add_user(admin, own_server.url, rights(what))
    with configure(redis=url, prefix="only_one:"):
        admin.config_resetstat()
        use(admin, url)
    texts = (
        [path.read_text() for path in Path(only_one_package.__file__).parent.rglob("*.py")] if what == "tasks" else []
    )
    in_scripts = {command for text in texts for command in re.findall(r"redis\.call\('(\w+)'", text)}
    assert in_scripts <= rights(what)  # also where they are seldom called, as for a task that is withdrawn
    in_vain = rights(what) - used(admin) - in_scripts
    assert in_vain <= (set() if what == "functions" else rights("functions"))


def test_three_commands_are_enough_to_look(own_server: RedisServer, admin: Any) -> None:
    url = add_user(admin, own_server.url, {"scan", "get", "pttl"})
    with configure(redis=own_server.url, prefix="only_one:"), Running("looked-at"):
        assert "only_one:looked-at" in {each.key for each in held(redis=url)}


def test_without_eval_a_timeout_is_enough(own_server: RedisServer, admin: Any) -> None:
    try:
        url = add_user(admin, own_server.url, {"set", "get", "delifeq"})
    except redis.ResponseError:
        pytest.skip("the server has no DELIFEQ")
    with configure(redis=url, prefix="only_one:"):
        assert decorated(lambda: "done", timeout=600)() == "done"
    assert not admin.exists("only_one:k")


def test_a_warning_names_what_a_task_may_not_do(
    own_server: RedisServer, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs all the same; but nothing else would tell why older tasks are not dropped, and redeliveries run again."""
    app: Any = an_app()
    newest = app.task(only_one("newest", when_busy=buffer_one())(work), name="newest", shared=False)
    with configure(redis=add_user(admin, own_server.url, rights("functions")), prefix="only_one:"):
        answer = newest.delay(1)
        with start_worker(app, pool="solo", perform_ping_check=False, loglevel="WARNING"):
            assert answer.get(timeout=LIMIT) == 1
    ours = [each for each in caplog.records if each.name == "only_one"]
    (warning,) = [each.getMessage() for each in ours if each.levelname == "WARNING"]
    assert warning.startswith(f"the completion marker or number of {answer.id} cannot be read or written")


def test_another_database(own_server: RedisServer, admin: Any) -> None:
    url = add_user(admin, own_server.url, rights("functions") | rights("a database other than 0"))
    with configure(redis=url.removesuffix("0") + "1", prefix="only_one:"):
        assert decorated(lambda: is_renewed(current_lock()), lease=60)()


def test_a_cluster() -> None:
    with clients("cluster") as place:
        url = add_user(place.witness, place.server.url, rights("functions") | rights("a cluster"))
        with redis.RedisCluster.from_url(url) as cluster, configure(redis=cluster, prefix="only_one:"):
            assert decorated(lambda: is_renewed(current_lock()), lease=60)()
            assert decorated_async(lambda: "done")() == "done"
        assert not place.witness.keys("*")
