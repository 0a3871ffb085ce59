"""What a covered call costs beside the bare commands that it cannot do without, and beside the recipe of 2010.

    python -m benchmarks.round_trips [--rounds N] [--calls N] [--seed N]

All variants are measured in one run, in blocks of calls in random order; of each round the ratio to the bare commands
is taken, and of the ratios the median.
The server counts the commands.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis

from only_one import configure, only_one
from only_one.testing import redis_server

R = TypeVar("R")
TTL = 30_000

COMPARE_AND_DELETE = """
if redis.call('get', KEYS[1]) == ARGV[1] then
    return redis.call('del', KEYS[1])
end
return 0
"""


def recipe_of_2010(client: Any, key: str, timeout: float) -> Callable[[Callable[..., R]], Callable[..., R | None]]:
    """redis-py's `Lock` in a plain decorator, as it is pasted today."""

    def decorate(function: Callable[..., R]) -> Callable[..., R | None]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> R | None:
            lock = client.lock(key, timeout=timeout)
            if not lock.acquire(blocking=False):
                return None
            try:
                return function(*args, **kwargs)
            finally:
                lock.release()

        return wrapper

    return decorate


def runs(client: Any) -> dict[str, Callable[[], Any]]:
    """Calls that run; the bare commands first."""
    sha = client.script_load(COMPARE_AND_DELETE)
    tokens = iter(range(sys.maxsize))

    def bare() -> None:
        token = b"token-%d" % next(tokens)
        client.set("bare", token, nx=True, px=TTL)
        client.evalsha(sha, 1, "bare", token)

    @only_one("{name}:{feed_url:md5}")
    def one_argument(feed_url: str) -> None:
        pass

    @only_one
    def all_arguments(feed_url: str) -> None:
        pass

    @recipe_of_2010(client, "recipe", TTL / 1000)
    def recipe(feed_url: str) -> None:
        pass

    url = "https://example.org/feed.xml"
    return {
        "two bare commands": bare,
        "only_one, key of one argument": lambda: one_argument(url),
        "only_one, key of all arguments": lambda: all_arguments(url),
        "redis-py's Lock in a decorator": lambda: recipe(url),
    }


def skips(client: Any) -> tuple[dict[str, Callable[[], Any]], Callable[[Callable[[], None]], None]]:
    """Calls that find their key taken, the bare command first; and what takes the keys around them."""
    client.set("bare-taken", "somebody")

    def bare() -> None:
        client.set("bare-taken", b"token", nx=True, px=TTL)

    @only_one("{name}:{feed_url:md5}")
    def covered(feed_url: str, then: Callable[[], None] | None = None) -> None:  # noqa: ARG001 - it is in the key
        if then:
            then()

    @recipe_of_2010(client, "recipe-taken", TTL / 1000)
    def recipe(then: Callable[[], None] | None = None) -> None:
        if then:
            then()

    url = "https://example.org/feed.xml"
    variants: dict[str, Callable[[], Any]] = {
        "a bare SET NX PX": bare,
        "only_one, skipped": lambda: covered(url),
        "redis-py's Lock in a decorator, skipped": recipe,
    }
    return variants, lambda then: covered(url, lambda: recipe(then))


def ratios(variants: dict[str, Callable[[], Any]], options: argparse.Namespace) -> dict[str, list[float]]:
    """For each variant its time in each round, divided by that of the first."""
    order = list(variants)
    base = order[0]
    found: dict[str, list[float]] = {name: [] for name in order}
    for _ in range(options.rounds):
        seconds = {}
        for name in options.random.sample(order, len(order)):
            call = variants[name]
            begun = time.perf_counter()
            for _ in range(options.calls):
                call()
            seconds[name] = time.perf_counter() - begun
        for name in order:
            found[name].append(seconds[name] / seconds[base])
    return found


def commands_of(client: Any, call: Callable[[], Any]) -> str:
    """The commands that one call costs, as the server counts them."""
    call()  # what is learnt once per server is learnt here
    client.config_resetstat()
    call()
    stats = client.info("commandstats")
    own = {"cmdstat_config|resetstat", "cmdstat_info"}
    counted = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items() if name not in own}
    return ", ".join(f"{count} {name}" for name, count in sorted(counted.items()))


def report(client: Any, title: str, variants: dict[str, Callable[[], Any]], options: argparse.Namespace) -> None:
    """Print one table."""
    print(f"\n{title}\n{'':42}  median   10 %   90 %  commands")
    for call in variants.values():
        call()
    for name, found in ratios(variants, options).items():
        tenths = statistics.quantiles(found, n=10)
        figures = f"{statistics.median(found):6.3f} {tenths[0]:6.3f} {tenths[-1]:6.3f}"
        print(f"{name:42}  {figures}  {commands_of(client, variants[name])}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400, help="blocks of calls of each variant (400)")
    parser.add_argument("--calls", type=int, default=20, help="calls in a block (20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the order of the blocks")
    options = parser.parse_args()
    options.random = random.Random(options.seed)
    with redis_server() as server, redis.Redis.from_url(server.url) as client, configure(redis=client):
        print(f"redis-py {redis.__version__}, {options.rounds} rounds of {options.calls}, seed {options.seed}")
        report(client, "A run", runs(client), options)
        variants, while_taken = skips(client)
        while_taken(lambda: report(client, "A skip", variants, options))


if __name__ == "__main__":
    main()
