"""The calls that `benchmarks.costs` measures, ours and the peers', each beside the bare commands it cannot do without.

For each group of calls the medians of the ratios to its first call.
The calls of a group take turns, in blocks, in an order that is drawn for each round; each round gives one ratio.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import redis
import redis.asyncio
from celery import Celery

from only_one import configure, only_one
from only_one.testing import redis_server

Calls = dict[str, Callable[[], Any]]

SECONDS = 30
LONG = 3600
AT_A_TIME, CONNECTIONS = 1000, 10
"""Async calls at a time, and the connections of the pool that they share."""

URL = "https://example.org/feed.xml"
COMPARE_AND_DELETE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

TAKEN, BUSY = "taken", b"by somebody"
"""A key that is always taken, and its value."""

NOTHING = "nothing"
"""What the other calls of its group have around them, too; it is taken away."""

SET, TWO = "a bare SET", "two bare commands"
OURS, ONE, ALL = "only_one", "only_one, key of one argument", "only_one, MD5 of all"
SINGLETON, ONCE = "celery-singleton", "celery-once"


@dataclass
class Measure:
    """Rounds of blocks of calls; those of coroutine functions run in an event loop.

    Attributes:
        rounds: how many blocks of each call.
        calls: how many calls in a block.
        found: the medians of the ratios, by group and call.
    """

    rounds: int
    calls: int
    found: dict[tuple[str, str], float] = field(default_factory=dict)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __call__(self, group: str, calls: Calls, clock: Callable[[], float] = time.perf_counter) -> None:
        """Measure the calls of a group."""
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():
            self._repeat(call, 1)  # what is learnt once is learnt here
        for _ in range(self.rounds):
            for name in random.sample(list(calls), len(calls)):
                begun = clock()
                self._repeat(calls[name], self.calls)
                seconds[name].append(clock() - begun)
        around = seconds.pop(NOTHING, [0.0] * self.rounds)
        bare = next(iter(seconds.values()))
        for name, each in seconds.items():
            ratios = [(ours - both) / (least - both) for ours, least, both in zip(each, bare, around, strict=True)]
            self.found[group, name] = statistics.median(ratios)

    def _repeat(self, call: Callable[[], Any], times: int) -> None:
        async def repeat() -> None:
            for _ in range(times):
                await call()

        if inspect.iscoroutinefunction(call):
            self._loop.run_until_complete(repeat())
        else:
            for _ in range(times):
                call()


def two_commands(client: Any) -> Callable[[], None]:
    """What no lock that knows its owner can do without: SET NX PX, and compare and delete."""
    sha, tokens = client.script_load(COMPARE_AND_DELETE), count()

    def bare() -> None:
        token = b"token-%d" % next(tokens)
        client.set("bare", token, nx=True, px=SECONDS * 1000)
        client.evalsha(sha, 1, "bare", token)

    return bare


def two_async_commands(client: Any, async_client: Any) -> Callable[[], Awaitable[int]]:
    """The same by redis-py's asyncio client, with a key for each."""
    sha, numbers = client.script_load(COMPARE_AND_DELETE), count()

    async def bare() -> int:
        key, token = f"bare:{next(numbers)}", b"token"
        await async_client.set(key, token, nx=True, px=SECONDS * 1000)
        return int(await async_client.evalsha(sha, 1, key, token))

    return bare


def locks(client: Any, url: str) -> dict[str, tuple[Callable[[str, int], Any], dict[str, bool]]]:
    """By each peer: how it makes a lock of a name and seconds, and how that is acquired without waiting for it."""
    redis_lock, sherlock, huey = (importlib.import_module(name) for name in ("redis_lock", "sherlock", "huey"))
    queue, at_once = huey.RedisHuey("costs", url=url), {"blocking": False}
    return {
        "redis-py's Lock": (lambda key, ttl: client.lock(key, timeout=ttl), at_once),
        "python-redis-lock": (lambda key, ttl: redis_lock.Lock(client, key, expire=ttl), at_once),
        "sherlock": (lambda key, ttl: sherlock.RedisLock(key, client=client, expire=ttl), at_once),
        # It raises where it is taken, and does not ask who its owner is.
        "huey (no owner)": (lambda key, _: queue.lock_task(key), {}),
    }


def nothing(feed_url: str) -> None:
    """Do nothing."""


async def async_nothing(feed_url: str) -> None:
    """Do nothing."""


def functions(measure: Measure, client: Any, url: str) -> None:
    """A run and a skip of a plain function, and of an async one, beside the locks of peers around nothing."""

    def work(feed_url: str, then: Callable[[], Any] = int) -> Any:  # noqa: ARG001 - it is in the key
        return then()

    bare: Any = redis.asyncio.Redis.from_url(url)

    async def bare_set() -> None:
        await bare.set(TAKEN, BUSY, nx=True, px=SECONDS * 1000)

    ours, of_all = partial(only_one("one:{feed_url:md5}")(work), URL), partial(only_one("all:{md5}")(nothing), URL)
    ours_async = partial(only_one("one:{feed_url:md5}")(async_nothing), URL)
    run: Calls = {TWO: two_commands(client), ONE: ours, ALL: of_all}
    skip: Calls = {SET: partial(client.set, TAKEN, BUSY, nx=True, px=SECONDS * 1000), OURS: ours}
    taken = importlib.import_module("huey.exceptions").TaskLockedException

    def around_nothing(make: Callable[[str, int], Any], at_once: dict[str, bool], key: str) -> None:
        lock = make(key, SECONDS)
        with suppress(taken):
            if lock.acquire(**at_once):
                lock.release()

    def measure_skips() -> None:
        measure("a skip", skip)
        measure("an async skip", {SET: bare_set, OURS: ours_async})

    with redis.Redis.from_url(url) as of_peers:  # the bare commands share their connection with nobody, nor do ours
        for name, (make, at_once) in locks(of_peers, url).items():
            run[name] = partial(around_nothing, make, at_once, f"run-{name}")
            skip[name] = partial(around_nothing, make, at_once, f"skip-{name}")
            make(f"skip-{name}", LONG).acquire(**at_once)
        measure("a run", run)
        measure("an async run", {TWO: two_async_commands(client, bare), OURS: ours_async})
        ours(measure_skips)


def many_async_functions(measure: Measure, client: Any, url: str) -> None:
    """Async runs at a time through few connections, beside bare commands through a pool that waits for a free one."""
    waits: Any = redis.asyncio.BlockingConnectionPool.from_url(url, timeout=None, max_connections=CONNECTIONS)
    own_client: Any = redis.Redis.from_url(url, max_connections=CONNECTIONS)
    numbers = count()

    async def work(number: int) -> int:
        return number

    ours = only_one(work, key="{number}", timeout=600, redis=own_client)

    async def at_a_time(call: Callable[[], Awaitable[Any]]) -> None:
        if None in await asyncio.gather(*(call() for _ in range(AT_A_TIME))):
            msg = "a call has not run"
            raise RuntimeError(msg)

    bare = partial(at_a_time, two_async_commands(client, redis.asyncio.Redis(connection_pool=waits)))
    few = replace(measure, rounds=min(measure.rounds, 7), calls=1)
    few("1,000 async runs at once", {TWO: bare, OURS: partial(at_a_time, lambda: ours(next(numbers)))})


def app_of(url: str) -> Celery:
    """An app whose broker and whose peers' locks are in the server."""
    app = Celery("costs", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, singleton_backend_url=url)
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": {"url": url, "default_timeout": LONG}}
    return app


def runs_of_tasks(measure: Measure, client: Any, url: str) -> None:
    """Processor time that is added to a task's run, in Celery's own tracer, over what two bare commands add there."""
    from celery.app.trace import build_tracer  # noqa: PLC0415 - only processes that run tasks import it

    app, ids, two = app_of(url), count(), two_commands(client)

    def bare(feed_url: str) -> None:  # noqa: ARG001
        two()

    def traced(name: str, function: Callable[..., Any], **options: Any) -> Callable[[], None]:
        task = app.task(name=name, **options)(function)
        trace = build_tracer(name, task, app=app, propagate=True)

        def run() -> None:
            request = {"id": f"65aa68c2-01ca-4c04-8be0-{next(ids):012d}", "task": name, "is_eager": False}
            request |= {"args": (URL,), "kwargs": {}, "delivery_info": {"redelivered": False}}
            trace(request["id"], (URL,), {}, request)

        return run

    calls = {
        NOTHING: traced("nothing", nothing),
        TWO: traced("bare", bare),
        ONE: traced("one", only_one("{name}:{feed_url:md5}")(nothing)),
        ALL: traced("all", only_one("{name}:{md5}")(nothing)),
        "only_one, acks_late": traced("late", only_one("late:{feed_url:md5}")(nothing), acks_late=True),
    }
    measure("added to a task's run", calls, time.process_time)


def queueing(measure: Measure, client: Any, url: str) -> None:
    """`delay()` of a duplicate and of a new task, and a key of five arguments."""
    app, numbers, two = app_of(url), count(), two_commands(client)
    singleton = importlib.import_module("celery_singleton").Singleton
    once = importlib.import_module("celery_once").QueueOnce

    def task(number: int, two: int = 2, three: str = "three", four: bool = True, five: None = None) -> None:  # noqa: FBT001, FBT002
        """Do nothing."""

    bare = app.task(name="bare")(task)
    made: dict[str, Any] = {
        OURS: only_one(app.task(name="ours")(task)),
        SINGLETON: app.task(name="singleton", base=singleton)(task),
        ONCE: app.task(name="once", base=once, once={"graceful": True})(task),
    }

    def bare_delay() -> None:
        two()
        bare.delay(next(numbers))

    duplicates: Calls = {SET: partial(client.set, TAKEN, BUSY, nx=True, px=SECONDS * 1000)}
    new: Calls = {"delay() and two bare commands": bare_delay}
    for name, each in made.items():
        each.delay(-1)
        duplicates[name] = partial(each.delay, -1)
        new[name] = lambda task=each: task.delay(next(numbers))  # type: ignore[misc]
    measure("delay() of a duplicate", duplicates)
    measure("delay() of a new task", new)
    ours, args = made[OURS].run.__only_one__, (1, 2, "three", True, None)
    theirs = partial(made[SINGLETON].generate_lock, "ours", args, {})
    measure("a key", {SINGLETON: theirs, OURS: partial(ours.make_key, ours.plain, args, {})})


def measure_groups(measure: Measure) -> dict[tuple[str, str], float]:
    """Measure all groups."""
    logging.disable(logging.ERROR)
    with redis_server() as server, redis.Redis.from_url(server.url) as client, configure(redis=client):
        client.set(TAKEN, BUSY)
        for group in (functions, many_async_functions, runs_of_tasks, queueing):
            group(measure, client, server.url)
    return measure.found
