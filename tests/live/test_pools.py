"""Tasks of every kind in every pool: they run, are skipped, retried, put back and ended by limits.

The suite runs each pool once; `make matrix` runs each with every combination of settings.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import redis
from celery.exceptions import TimeLimitExceeded

from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.documented import documented
from tests.live import pools_app as live
from tests.live.workers import Witness, answered, celery_worker, environment, sender

SIZE = {"prefork": 3, "threads": 3, "gevent": 10, "eventlet": 10, "solo": 1}

LIMITED, TERMINATED = {"prefork", "gevent"}, {"prefork", "gevent", "eventlet"}
"""The pools in which Celery can end a run, at its hard time limit and when it is revoked."""

PROMISED: dict[str, Callable[[str], str]] = {
    "a duplicate of a task that runs": lambda pool: "runs after it" if pool == "solo" else "is skipped",
    "a lease is renewed while its run goes on": lambda _: "yes",
    "`self.retry()`, `autoretry_for`": lambda _: "run again",
    "a requeued task": lambda _: "does not occupy the worker",
    "the key after the hard time limit": lambda pool: "is free" if pool in LIMITED else "Celery has no limit",
    "the key after `revoke(terminate=True)`": lambda pool: "is free" if pool in TERMINATED else "Celery cannot",
}
"""What the tests below see in each pool; the hard time limit of processes is in `test_ends`."""

SETTINGS: dict[str, list[Any]] = {
    "task_acks_late": [False, True],
    "task_track_started": [False, True],
    "worker_prefetch_multiplier": [4, 1],
}
if os.environ.get("POOLS_MATRIX"):
    VARIANTS: list[dict[str, Any]] = [
        dict(zip(SETTINGS, values, strict=True)) for values in itertools.product(*SETTINGS.values())
    ]
else:
    VARIANTS = [{}]
MATRIX = [(pool, settings) for settings in VARIANTS for pool in SIZE]

KINDS = {
    "plain": live.plain,
    "custom name": live.named,
    "annotated": live.annotated,
    "base class with __call__": live.based,
    "pydantic": live.modelled,
}


class Pool:
    """A worker of a pool, and its server."""

    def __init__(self, name: str, client: Any, witness: Witness) -> None:
        self.name = name
        self.client = client
        self.witness = witness

    def times(self, word: str, key: str = "") -> int:
        """How often runs have written this down."""
        return len(self.witness.lines(*[word, key][: 1 + bool(key)]))

    def take(self, key: str) -> None:
        """Somebody else has the key from now on."""
        self.client.set(f"live:{key}", "somebody else")

    def free(self, key: str) -> None:
        """And gives it back."""
        self.client.delete(f"live:{key}")

    def is_free(self, key: str) -> bool:
        """Whether the key is free, or comes to be."""
        return eventually(lambda: not self.client.exists(f"live:{key}"))


def name_of(each: tuple[str, dict[str, Any]]) -> str:
    return "-".join([each[0], *map(str, each[1].values())])


def those_of(pools: set[str]) -> pytest.MarkDecorator:
    """Only the pools that can do it in Celery."""
    matrix = [each for each in MATRIX if each[0] in pools]
    return pytest.mark.parametrize("pool", matrix, indirect=True, ids=name_of, scope="module")


@pytest.fixture(scope="module", params=MATRIX, ids=name_of)
def pool(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, server: Any) -> Iterator[Pool]:
    name, settings = request.param
    folder = tmp_path_factory.mktemp("pool")
    witness = Witness(folder / "witness")
    env = environment(server.url, witness.path, LIVE_SETTINGS=json.dumps(settings))
    with (
        redis.Redis.from_url(server.url) as client,
        celery_worker("tests.live.pools_app", folder / "log", env, pool=name, size=SIZE[name]),
    ):
        yield Pool(name, client, witness)
        assert eventually(lambda: not list(client.scan_iter("live:*")))


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with redis_server() as server, sender(live.app, server.url):
        yield server


@pytest.fixture
def key() -> str:
    return str(uuid4())


def send(task: Any, key: str) -> Any:
    return task.delay(live.Feed(key=key, pages=3).model_dump() if task is live.modelled else key)


def result(answer: Any) -> Any:
    found = answer.get(timeout=LIMIT)
    return found["whose"] if isinstance(found, dict) else found


@pytest.mark.parametrize("promise", PROMISED)
def test_the_page_says_so(promise: str) -> None:
    assert [documented(promise, pool) for pool in SIZE] == [PROMISED[promise](pool) for pool in SIZE]


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_runs_and_is_skipped(pool: Pool, key: str, kind: str) -> None:
    task = KINDS[kind]
    answer = send(task, key)
    assert result(answer) == [task.name, answer.id, 0, True]
    assert pool.is_free(key)
    pool.take(key)
    assert result(send(task, key)) is None
    pool.free(key)
    answer = send(task, key)
    assert result(answer) == [task.name, answer.id, 0, True]
    assert pool.is_free(key)
    around = {"annotated": "annotation", "base class with __call__": "call"}
    assert kind not in around or pool.times(around[kind]) == 3


def test_duplicates_are_skipped(pool: Pool, key: str) -> None:
    running = send(live.gated, key)
    assert eventually(lambda: pool.times("begin", key))
    copies = [send(live.gated, key) for _ in range(4)]
    if pool.name == "solo":  # which does nothing else meanwhile: they come after it
        pool.client.rpush(f"gate-{key}", *range(5))
        answers = [running, *copies]
        assert [result(answer) for answer in answers] == [[live.gated.name, each.id, 0, True] for each in answers]
        return
    assert [result(copy) for copy in copies] == [None] * 4
    assert not running.ready()
    pool.client.rpush(f"gate-{key}", "open")
    assert result(running) == [live.gated.name, running.id, 0, True]
    assert (pool.times("begin", key), pool.times("end", key)) == (1, 1)
    assert pool.is_free(key)


def test_a_run_renews_its_lease(pool: Pool, key: str) -> None:
    running = send(live.renewed, key)
    assert eventually(lambda: pool.times("begin", key))
    pool.client.pexpire(f"live:{key}", live.LEASE * 1000 // 2)
    pool.client.rpush(f"gate-{key}", "open")
    assert result(running) > live.LEASE * 900


@pytest.mark.parametrize("task", [live.again, live.failing], ids=["self.retry", "autoretry_for"])
def test_a_task_that_is_retried(pool: Pool, key: str, task: Any) -> None:
    answer = send(task, key)
    assert result(answer) == [task.name, answer.id, 2, True]
    assert pool.is_free(key)


def test_a_task_that_is_put_back(pool: Pool, key: str) -> None:
    pool.take(key)
    answer = send(live.patient, key)
    other = send(live.plain, other_key := str(uuid4()))
    assert result(other) == [live.plain.name, other.id, 0, True]  # nobody waits in the worker
    assert pool.is_free(other_key)
    assert eventually(lambda: is_waiting(pool, answer.id))
    assert not answer.ready()
    pool.free(key)
    assert result(answer) == [live.patient.name, answer.id, 0, True]
    assert pool.is_free(key)


def is_waiting(pool: Pool, task_id: str) -> bool:
    """Whether the task's message has been put back into the queue, with a countdown of our own."""
    messages = [*pool.client.lrange("celery", 0, -1), *pool.client.hvals("unacked")]
    return any(task_id.encode() in message and b"only_one" in message for message in messages)


@those_of(TERMINATED)
def test_revoke_with_terminate(pool: Pool, key: str) -> None:
    running = send(live.gated, key)
    assert eventually(lambda: pool.times("begin", key))
    assert answered(live.app.control.revoke, running.id, terminate=True)
    assert pool.is_free(key)
    assert pool.times("end", key) == 0


@those_of(LIMITED - {"prefork"})
def test_the_hard_time_limit(pool: Pool, key: str) -> None:
    with pytest.raises(TimeLimitExceeded):
        result(send(live.limited, key))
    assert pool.times("begin", key) == 1
    assert pool.is_free(key)
    answer = send(live.plain, key)
    assert result(answer) == [live.plain.name, answer.id, 0, True]
