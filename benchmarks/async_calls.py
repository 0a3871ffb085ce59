"""What 1,000 async calls at a time cost through a pool of 10, beside bare commands through a pool that waits.

    python -m benchmarks.async_calls [--calls N] [--connections N] [--rounds N]

Bare is redis-py's asyncio client with a `BlockingConnectionPool`: a SET and a release by script for each call.
The others are decorated calls, by a client whose pool is as large and by that of django-redis.
Each round measures all, in another order each time; the medians are shown, and how many calls have run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio
from django.conf import settings

from benchmarks.costs_measured import COMPARE_AND_DELETE
from only_one import only_one
from only_one.testing import redis_server

Call = Callable[[int], Awaitable[Any]]


def decorated(client: Any) -> Call:
    """A decorated coroutine function that does nothing."""

    async def work(number: int) -> int:
        return number

    return only_one(work, key="{number}", timeout=600, redis=client)


async def seconds(call: Call, calls: int) -> tuple[float, int]:
    """How long so many calls at a time take, and how many have run; the first one connects, and is not counted."""
    await call(calls)
    began = time.perf_counter()
    results = await asyncio.gather(*(call(number) for number in range(calls)), return_exceptions=True)
    return time.perf_counter() - began, sum(type(each) is int for each in results)


async def bare(url: str, calls: int, connections: int) -> tuple[float, int]:
    """The same by bare commands."""
    pool: Any = redis.asyncio.BlockingConnectionPool.from_url(url, max_connections=connections, timeout=None)
    async with redis.asyncio.Redis.from_pool(pool) as client:
        sha = await client.script_load(COMPARE_AND_DELETE)

        async def call(number: int) -> int:
            key, token = f"bare:{number}", f"token {number}"
            await client.set(key, token, nx=True, px=600_000)
            run: Any = client.evalsha(sha, 1, key, token)
            return int(await run)

        return await seconds(call, calls)


def main() -> int:
    """Measure, and print a line for each way.

    Returns:
        1 if a call has not run, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with redis_server() as server:
        pool = {"CONNECTION_POOL_KWARGS": {"max_connections": options.connections}}
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url, "OPTIONS": pool}
        settings.configure(CACHES={"default": cache})
        from django_redis import get_redis_connection  # noqa: PLC0415 - it reads the settings

        own = decorated(redis.Redis.from_url(server.url, max_connections=options.connections))
        djangos = decorated(get_redis_connection("default"))
        ways: dict[str, Callable[[], Any]] = {
            "bare SET and EVALSHA": lambda: bare(server.url, options.calls, options.connections),
            "decorated": lambda: seconds(own, options.calls),
            "decorated, by django-redis": lambda: seconds(djangos, options.calls),
        }
        measured: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in random.sample(list(ways), len(ways)):
                measured[way].append(asyncio.run(ways[way]()))
    print(f"{'':28}seconds for {options.calls} at a time, of bare, have run")
    medians = {way: statistics.median(each for each, _ in results) for way, results in measured.items()}
    least = {way: min(ran for _, ran in results) for way, results in measured.items()}
    for way, median in medians.items():
        print(f"{way:28}{median:.3f}, {median / medians['bare SET and EVALSHA']:.2f}, {least[way]}")
    return int(min(least.values()) < options.calls)


if __name__ == "__main__":
    sys.exit(main())
