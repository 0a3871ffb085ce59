"""What 1,000 async calls at a time cost through a pool of 10, beside bare commands through a pool that waits.

    python -m benchmarks.async_calls [--calls N] [--connections N] [--rounds N]

Bare is redis-py's asyncio client with a `BlockingConnectionPool`: a SET and a release by script for each call.
The others are decorated calls, by a client whose pool is as large and by that of django-redis.
Each round measures all, in another order each time; the medians are shown, if all calls have run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio
from django.conf import settings

from benchmarks.costs_measured import COMPARE_AND_DELETE, Measure, ratios
from only_one import only_one
from only_one.testing import redis_server


async def work(number: int) -> int:
    """Do nothing."""
    return number


def at_a_time(call: Callable[[int], Awaitable[int]], calls: int) -> Callable[[], Awaitable[None]]:
    """So many calls at a time, each with its own number, of which it returns an integer if it has run."""

    async def call_all() -> None:
        results = await asyncio.gather(*map(call, range(calls)), return_exceptions=True)
        others = [each for each in results if not isinstance(each, int)]
        if others:
            msg = f"{len(others)} of {calls} calls have not run: {others[0]!r}"
            raise RuntimeError(msg)

    return call_all


def main() -> None:
    """Measure, and print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    with redis_server() as server:
        pool: dict[str, Any] = {"max_connections": given.connections}
        options = {"CONNECTION_POOL_KWARGS": pool}
        cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.url, "OPTIONS": options}
        settings.configure(CACHES={"default": cache})
        from django_redis import get_redis_connection  # noqa: PLC0415 - it reads the settings

        own = redis.Redis.from_url(server.url, **pool)
        waits: Any = redis.asyncio.BlockingConnectionPool.from_url(server.url, timeout=None, **pool)
        client: Any = redis.asyncio.Redis(connection_pool=waits)
        sha = own.script_load(COMPARE_AND_DELETE)

        async def bare(number: int) -> int:
            key, token = f"bare:{number}", f"token {number}"
            await client.set(key, token, nx=True, px=600_000)
            return int(await client.evalsha(sha, 1, key, token))

        def decorated(client: Any) -> Any:
            return only_one(work, key="{number}", timeout=600, redis=client)

        ways = {"bare SET and EVALSHA": bare, "decorated": decorated(own)}
        ways["decorated, by django-redis"] = decorated(get_redis_connection("default"))
        calls = {way: at_a_time(call, given.calls) for way, call in ways.items()}
        seconds = Measure(given.rounds, 1, time.time_ns())(calls)
    for way, ratio in ratios(seconds).items():
        median = statistics.median(seconds[way])
        print(f"{way:28}{median:.3f} s for {given.calls} at a time, {ratio:.2f} of bare")


if __name__ == "__main__":
    main()
