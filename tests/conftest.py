"""A real server for the session, and for each test a prefix and settings of its own."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import pytest
from redis import Redis
from redis.connection import AbstractConnection

from only_one import configure
from only_one.events import Event
from only_one.lock import renewal
from rigs.proxy import Proxy
from rigs.servers import RedisServer, redis_server
from rigs.shared_tasks import forget_shared_tasks
from tests.clients import KINDS, Clients, clients
from tests.decorated import events, patient
from tests.faults.programs import Running, RunningAsync

os.environ.pop("PYTHONUNBUFFERED", None)  # with it, a program that forgets to flush is seen to hang by others only

LONG_FIRST = ("wheel", "recipe", "newsletter", "live", "histories", "faults", "example")
"""Words in the names of files that take longest, which are begun first: else one would be alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest; no name has the address of an object, which differs in each process of xdist."""
    for item in items:
        assert " at 0x" not in item.nodeid, f"{item.nodeid}: give its rows ids"

    def turn(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return next((turn for turn, word in enumerate(LONG_FIRST) if word in file), len(LONG_FIRST))

    items.sort(key=turn)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The server that the tests share."""
    with redis_server() as server:
        yield server.url


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left_open() -> Iterator[None]:
    """What a module's tests have left is not to fail another's.

    A result of Celery's that is collected would look for a server that is gone.
    A socket in a circle of references may be collected before the connection that closes it.
    """
    yield
    celery_result: Any = sys.modules.get("celery.result")
    results = kinds_of(celery_result.AsyncResult) if celery_result is not None else set()
    connections = kinds_of(AbstractConnection)
    for each in gc.get_referrers(*results, *connections):  # which has an instance refer to its class
        if type(each) in results:
            each.backend = None
        elif type(each) in connections:
            with suppress(AttributeError):  # of one whose making was interrupted
                each.disconnect()


def kinds_of(base: type) -> set[type]:
    """A class and all that are made of it."""
    return {base}.union(*map(kinds_of, base.__subclasses__()))


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What this test's keys begin with; the settings are restored at its end, and none of its tokens is looked for.

    Or that would be at a port that another test's server, or proxy, may have by then.
    """
    for variable in ("ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    forget_shared_tasks()
    # Apps of other tests are not to say anything of functions.
    monkeypatch.setattr("only_one.celery.app_settings.current_app", lambda: None)
    own = f"test:{uuid4().hex}:"
    with configure(prefix=own):
        yield own
    renewal._renewer.pending_releases.clear()


@pytest.fixture
def redis(redis_url: str, prefix: str) -> Iterator[Redis]:
    """A client of the shared server, on which everything that the test covers takes its keys, too.

    The product's own client would wait for a second or two, and a busy machine may take longer.
    """
    with Redis.from_url(redis_url) as client, configure(redis=patient(redis_url)):
        yield client
        for key in client.scan_iter(match=f"*{prefix}*", count=1000):
            client.delete(key)


@pytest.fixture
def server(prefix: str) -> Iterator[RedisServer]:  # noqa: ARG001 - for its settings, which are restored
    """A server of the test's own, to be paused and killed; what the test covers takes its keys there."""
    with redis_server() as own, configure(redis=own.url):
        yield own


@pytest.fixture(scope="module", params=KINDS)
def those(request: pytest.FixtureRequest) -> Iterator[Clients]:
    """A server of the module's own for each kind of client."""
    with clients(request.param) as found:
        yield found


@pytest.fixture(scope="module")
def own_server() -> Iterator[RedisServer]:
    """A server of the module's own: it is configured, and its databases are told apart and emptied."""
    with redis_server() as own:
        yield own


@pytest.fixture
def key(prefix: str) -> str:
    """A key as it is in Redis, of which a decorated function names the last part."""
    return f"{prefix}k"


@pytest.fixture
def url(redis_url: str) -> str:
    """The server, which some tests have in several kinds."""
    return redis_url


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    """A way to the server that breaks when it is told to."""
    with Proxy(url) as proxy:
        yield proxy


@pytest.fixture
def happened() -> Iterator[list[Event]]:
    """All events of the test."""
    with events() as seen:
        yield seen


@pytest.fixture(params=[Running, RunningAsync], ids=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> type[Running]:
    """A run in a thread, and one in an event loop."""
    kind: type[Running] = request.param
    return kind


@pytest.fixture
def busy() -> type[Running]:
    """`with busy("k"):` has a run hold a key in another thread until the block ends."""
    return Running
