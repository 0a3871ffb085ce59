"""How long the keys of cancelled calls stay: a token of unknown fate is released in the background, many in one trip.

    python -m benchmarks.leftovers [--calls N] [--milliseconds N] [--at-once N] [--alone N] [--seed N]

Async calls are cancelled when the server has carried out their SET and the reply is still on its way, on a link that
takes its time. While they are cancelled, the thread that renews takes the server for down, as after an outage; then
the seconds are counted until the last key is gone. Beside it the same with one key in each trip.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

import redis

from only_one import configure, only_one
from only_one.connections import cluster
from only_one.connections.server import find_server
from only_one.lock import renewal
from only_one.testing import RedisServer, redis_server

if TYPE_CHECKING:
    from typing_extensions import Self

PREFIX = "leftovers:"
LIMIT = 1800.0
"""Seconds after which the keys are not expected to be gone any more."""


class Link(AbstractContextManager["Link"]):
    """A way to a server on which whatever is sent arrives half a round trip later, and nothing waits for anything else.

    Attributes:
        url: where clients connect.
    """

    def __init__(self, port: int, round_trip: float) -> None:
        self._port = port
        self._delay = round_trip / 2
        self._loop = asyncio.new_event_loop()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_open.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        listening = self._loop.run_until_complete(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
        self._is_open.set()
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))

    async def _connect(self, asks: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        with suppress(asyncio.CancelledError):  # asyncio would print a traceback for it
            await asyncio.gather(self._forward(asks, writer), self._forward(reader, answers))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while True:
            try:
                chunk = await source.read(65536)
            except ConnectionError:
                chunk = b""
            self._loop.call_later(self._delay, target.write if chunk else lambda _: target.close(), chunk)
            if not chunk:
                return


async def cancel_calls(numbers: range, client: Any, options: argparse.Namespace) -> None:
    """Cancel one call for each number, once the server has its key and before the reply is here."""

    @only_one("{number}", timeout=3600)
    async def call(number: int) -> None:
        pass

    # Others first, which make the connections: cancelled calls lose theirs.
    await asyncio.gather(*[call(-number - 1) for number in numbers])
    tasks = [asyncio.ensure_future(call(number)) for number in numbers]
    keys = [f"{PREFIX}{number}" for number in numbers]
    while client.exists(*keys) < len(keys) and not all(each.done() for each in tasks):  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.001)
    await asyncio.sleep(options.random.uniform(0, options.milliseconds / 4000))
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.1)  # again where Python before 3.12 loses it


async def cancel_all(client: Any, options: argparse.Namespace) -> None:
    """Cancel all calls, some at a time, as each has a connection of its own to lose."""
    for start in range(0, options.calls, options.together):
        numbers = range(start, min(start + options.together, options.calls))
        await cancel_calls(numbers, client, options)
        print(f"\r{numbers.stop} of {options.calls} cancelled", end="", file=sys.stderr)


def measure(server: RedisServer, at_once: int, options: argparse.Namespace) -> tuple[int, float]:
    """Have calls cancelled, and wait for their keys to be gone.

    Args:
        server: the server.
        at_once: how many keys are released in one trip.
        options: the program's.

    Returns:
        How many keys there were, and seconds until the last one was gone.

    Raises:
        RuntimeError: if some stayed.
    """
    product: Any = renewal
    cluster.MOST_IN_A_TRIP = at_once  # it is what is compared
    round_trip = options.milliseconds / 1000
    with (
        Link(server.port, round_trip) as link,
        redis.Redis.from_url(server.url) as client,
        configure(redis=link.url, prefix=PREFIX),
    ):
        client.flushall()
        node = find_server(link.url).node_of(PREFIX)
        node.fail(LIMIT)
        asyncio.run(cancel_all(client, options))
        keys = most = client.dbsize()
        begun = time.perf_counter()
        node.backs_off_until = 0.0
        for each in list(product._renewer.cleanups.values()):  # noqa: SLF001 - as if the rest were over
            each.try_at = 0.0
        product._renewer.see_to_it_by(0.0)  # noqa: SLF001
        while keys:
            time.sleep(0.01)
            if (left := client.dbsize()) != keys:
                keys = left
                print(f"\r{most - keys} of {most} keys are gone", end="", file=sys.stderr)
            if time.perf_counter() > begun + LIMIT:
                msg = f"{keys} keys were there after {LIMIT:g} s"
                raise RuntimeError(msg)
        seconds = time.perf_counter() - begun
        product._renewer.cleanups.clear()  # noqa: SLF001 - what may still arrive is not waited for
    print(file=sys.stderr)
    return most, seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="calls that are cancelled (2000)")
    parser.add_argument("--together", type=int, default=50, help="calls that are cancelled at a time (50)")
    parser.add_argument("--milliseconds", type=float, default=40, help="what a round trip takes (40)")
    parser.add_argument(
        "--at-once", type=int, default=cluster.MOST_IN_A_TRIP, help="keys that are released in one trip"
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the moments of cancelling")
    options = parser.parse_args()
    options.random = random.Random(options.seed)
    print(f"redis-py {redis.__version__}, {options.calls} calls, {options.milliseconds:g} ms, seed {options.seed}")
    print(f"{'in one trip':>12} {'keys':>8} {'seconds until the last is gone':>32}")
    with redis_server() as server:
        for at_once in dict.fromkeys((options.at_once, 1)):
            keys, seconds = measure(server, at_once, options)
            print(f"{at_once:12} {keys:8} {seconds:32.2f}", flush=True)


if __name__ == "__main__":
    main()
