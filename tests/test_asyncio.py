"""Decorated async functions: cancelled wherever they wait, in one event loop after the other, and many at a time."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings
from collections import defaultdict
from collections.abc import Coroutine, Generator
from typing import Any
from weakref import ref

import pytest
import redis as redis_py

from only_one import current_lock
from only_one.connections.asyncio_client import AsyncClient
from only_one.connections.server import Server
from only_one.lock import renewal
from rigs.waiting import LIMIT, eventually
from tests.clients import Clients
from tests.decorated import decorated

MANY = 1000
"""Calls at a time."""
OTHERS = 4
"""Connections at the most that look around in a cluster, or renew."""

MOST = 500
"""Places where a call waits; there are some twenty."""


async def work(number: int = 0) -> int:
    assert current_lock().is_held
    await asyncio.sleep(0)
    return number


def held() -> list[Any]:
    """The locks that are renewed."""
    return renewal._renewer.held()


class CancelledAt:
    """Awaits something, and has its task cancelled the n-th time that this waits.

    Attributes:
        waited: how often it has waited.
    """

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], *, when_done: bool) -> None:
        self._number = number
        self._work = work
        self._when_done = when_done
        self.waited = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        steps = self._work.__await__()
        sent: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = steps.send(sent) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            self.waited += 1
            if self.waited == self._number:
                if self._when_done and future is not None:
                    # Before the task goes on: it is cancelled when what it waits for is there already.
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            sent, error = None, None
            try:
                sent = yield future
            except BaseException as raised:  # noqa: BLE001 - it is for what is awaited
                error = raised


CASES: dict[str, tuple[dict[str, Any], bytes | None]] = {
    "lease": ({"lease": 600}, None),
    "kept": ({"timeout": 600, "at_least": 1}, None),
    "busy": ({"timeout": 600}, b"another's"),
}


@pytest.mark.parametrize(("options", "stored"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("when_done", [False, True], ids=["while it waits", "when it has waited"])
def test_a_call_that_is_cancelled_wherever_it_waits_leaves_no_key(
    redis: Any, redis_url: str, key: str, options: Any, stored: bytes | None, *, when_done: bool
) -> None:
    def is_as_before() -> bool:
        value = redis.get(key)
        is_kept = value is not None and b'"kept"' in value and redis.pttl(key) <= 1000
        return value == stored or is_kept

    async def drive(call: CancelledAt) -> Any:
        return await call

    cancelled = 0
    for number in range(1, MOST):
        if stored:
            redis.set(key, stored)
        with redis_py.Redis.from_url(redis_url) as client:  # a fresh one: to connect is to wait, too
            call = decorated(work, redis=client, **options)
            steps = CancelledAt(number, call(), when_done=when_done)
            try:
                assert asyncio.run(drive(steps)) == (None if stored else 0)
            except asyncio.CancelledError:
                cancelled += 1
            assert not held()
            assert eventually(is_as_before), f"cancelled at {number}: {redis.pttl(key)} ms {redis.get(key)}"
            assert eventually(lambda: not any(each.retained for each in renewal._renewer.pending_releases.values()))
            redis.delete(key)
            assert asyncio.run(call()) == 0
            redis.delete(key)
        if steps.waited < number:
            break
    print(f"{steps.waited} places, {cancelled} times cancelled")
    assert steps.waited > (1 if stored else 4)
    # redis-py's wait_for loses one that comes with the reply, and tasks do not count theirs before Python 3.11:
    # there only that of the work itself is certain to come.
    least = steps.waited / 2 if sys.version_info >= (3, 11) else 1
    assert stored or cancelled >= least


def test_a_client_lives_as_long_as_its_loop_and_its_server(redis_url: str) -> None:
    """Also in a loop that nobody closes: Python collects it, with its files."""

    async def of_a_server_that_is_dropped() -> Any:
        client = await Server(redis_py.Redis.from_url(redis_url)).async_client()
        return ref(client)

    server = Server(redis_py.Redis.from_url(redis_url))
    loops = [asyncio.new_event_loop() for _ in range(2)]
    first, again, other = (loop.run_until_complete(server.async_client()) for loop in (loops[0], *loops))
    assert first is again is not other
    dropped = loops[0].run_until_complete(of_a_server_that_is_dropped())
    gc.collect()
    for _ in range(10):  # the loop closes it in a task, which ends
        loops[0].run_until_complete(asyncio.sleep(0))
    gc.collect()
    assert dropped() is None
    loops.pop().close()
    gone: list[Any] = [ref(first), ref(other), ref(loops.pop())]
    del first, again, other
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert [each() for each in gone] == [None] * 3


@pytest.mark.parametrize("most", [1, 10, None])
def test_more_calls_at_a_time_than_connections_wait_for_one_another(
    those: Clients, most: int | None, prefix: str
) -> None:
    """As threads do; each has a key of its own, and all run. To open a thousand at once takes longer than each may."""
    many = MANY if those.kind == "plain" else MANY // 10
    options: dict[str, Any] = {} if most is None else {"max_connections": most}
    options |= {"socket_timeout": LIMIT, "socket_connect_timeout": LIMIT}  # after which redis-py connects again

    async def all_at_once() -> Any:
        return await asyncio.gather(*(call(number) for number in range(many)))

    with those.connected(**options) as client:
        call = decorated(work, "{number}", timeout=600, redis=client)
        begun = those.witness.info("stats")["total_connections_received"]
        assert asyncio.run(all_at_once()) == list(range(many))
        opened = those.witness.info("stats")["total_connections_received"] - begun
        assert opened <= min(most or many, 100) + OTHERS
        assert not those.witness.keys(f"*{prefix}*")


@pytest.mark.skipif(not hasattr(asyncio.Task, "cancelling"), reason="Python counts cancellations from 3.11 on")
def test_a_cancellation_that_redis_py_loses_ends_the_call(redis_url: str) -> None:
    """It connects with `asyncio.wait_for`, which until Python 3.12 loses one that comes at the last moment."""

    async def cancel_after(steps: int) -> None:
        """Each has a loop of its own, and so connects, which takes more steps than these."""
        call = asyncio.ensure_future(decorated(work, redis=redis_url)())
        for _ in range(steps):
            await asyncio.sleep(0)
        assert call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    for steps in range(8):
        asyncio.run(cancel_after(steps))


class Commands:
    """Commands of a client with two connections, of which each ends as its name says, once the test lets it."""

    def __init__(self) -> None:
        self._client = AsyncClient(lambda: self, 2)
        self._may_end: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def execute_command(self, command: str) -> str:
        await self._may_end[command].wait()
        if command.startswith("times out"):
            raise redis_py.TimeoutError
        return command

    async def send(self, *commands: str) -> list[asyncio.Task[Any]]:
        tasks = [asyncio.create_task(self._client.execute_command(command)) for command in commands]
        await asyncio.sleep(0)
        return tasks

    async def end(self, command: str, task: asyncio.Task[Any]) -> None:
        self._may_end[command].set()
        if command.startswith("times out"):
            with pytest.raises(redis_py.TimeoutError, match=r"^$"):
                await asyncio.wait_for(task, LIMIT)
        else:
            assert await asyncio.wait_for(task, LIMIT) == command
        await asyncio.sleep(0)  # the next one is sent


def test_commands_that_wait_for_a_connection_give_up_when_the_server_is_down() -> None:
    """Time-outs of commands that were sent together say nothing, as the loop may have been busy; one sent later does.

    A command that was cancelled takes no turn.
    """

    async def main() -> None:
        commands = Commands()
        names = ("times out", "times out too", "times out later", "answered", "waits", "waits too")
        first, second, later, answered, cancelled, waits = await commands.send(*names)
        cancelled.cancel()
        await commands.end("times out", first)
        await commands.end("times out too", second)
        await commands.end("times out later", later)
        with pytest.raises(redis_py.TimeoutError, match="did not answer on any"):
            await asyncio.wait_for(waits, LIMIT)
        await commands.end("answered", answered)

    asyncio.run(main())


def test_commands_that_wait_for_a_connection_go_on_while_the_server_answers_others() -> None:
    async def main() -> None:
        commands = Commands()
        names = ("first", "times out", "second", "times out later", "third", "times out last", "fourth")
        first, slow, second, later, third, last, fourth = await commands.send(*names)
        await commands.end("first", first)
        await commands.end("times out", slow)
        await commands.end("times out later", later)
        await commands.end("second", second)
        await commands.end("times out last", last)
        await commands.end("third", third)
        await commands.end("fourth", fourth)

        # Nor is one that timed out long ago the first of two.
        (alone,) = await commands.send("times out alone")
        await commands.end("times out alone", alone)
        again, fifth, sixth = await commands.send("times out again", "fifth", "sixth")
        await commands.end("times out again", again)
        await commands.end("fifth", fifth)
        await commands.end("sixth", sixth)

    asyncio.run(main())
