"""Covered coroutines: cancelled at every place where they wait, in one event loop after the other, and many at once."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from only_one import LockLost, LockUnavailable, current_lock, fail, only_one
from only_one.connections.asyncio_client import AsyncClient, make_async_client
from only_one.connections.server import Server
from only_one.driver import Commands, drive_async
from only_one.lock import renewal
from rigs.waiting import LIMIT, eventually
from tests.clients import KINDS, OF_ONE_SERVER, clients
from tests.proxy import Proxy
from tests.renewal import renew_now

NAME = "k"
MANY = 1000
"""Calls at a time."""
OTHERS = 4
"""Connections at the most that look around in a cluster, or renew."""

MOST = 500
"""Places where a call waits; there are some twenty."""


@pytest.fixture
def key(prefix: str) -> str:
    """The key as it is in Redis."""
    return f"{prefix}{NAME}"


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
                    # Before the task is told: it is cancelled when what it waits for is there already.
                    future.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            sent, error = None, None
            try:
                sent = yield future
            except BaseException as raised:  # noqa: BLE001 - it is for what is awaited
                error = raised


async def drive(steps: CancelledAt) -> Any:
    return await steps


def held() -> list[Any]:
    """What is renewed."""
    return renewal._renewer.held()


TIMES = {"lease": {"lease": 600}, "kept": {"timeout": 600, "at_least": 1}}


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
@pytest.mark.parametrize("when_done", [False, True], ids=["while it waits", "when it has waited"])
def test_a_call_that_is_cancelled_wherever_it_waits(
    redis: Any, redis_url: str, key: str, times: Any, *, when_done: bool
) -> None:
    async def work() -> str:
        await asyncio.sleep(0.001)
        return "done"

    def is_free() -> bool:
        value = redis.get(key)
        return value is None or (b'"kept"' in value and redis.pttl(key) <= 1000)

    cancelled = 0
    for number in range(1, MOST):
        with redis_py.Redis.from_url(redis_url) as client:  # a fresh one: to connect is to wait, too
            call: Any = only_one(work, key=NAME, redis=client, **times)
            steps = CancelledAt(number, call(), when_done=when_done)
            try:
                assert asyncio.run(drive(steps)) == "done"
            except asyncio.CancelledError:
                cancelled += 1
            assert not held()
            assert eventually(is_free), f"cancelled at {number}: {redis.pttl(key)} ms {redis.get(key)}"
            redis.delete(key)
            assert asyncio.run(call()) == "done"
            redis.delete(key)
        if steps.waited < number:
            break
    print(f"{steps.waited} places, {cancelled} times cancelled")
    assert steps.waited > 4
    # redis-py's wait_for loses one that meets the reply, and tasks do not count theirs before Python 3.11:
    # there only that of the work itself is certain to come.
    assert cancelled >= (steps.waited / 2 if sys.version_info >= (3, 11) else 1)


def test_a_call_that_is_cancelled_while_busy(redis: Any, redis_url: str, key: str) -> None:
    redis.set(key, "somebody else")
    call: Any
    for number in range(1, MOST):
        with redis_py.Redis.from_url(redis_url) as client:

            async def work() -> str:
                return "done"

            call = only_one(work, key=NAME, redis=client, timeout=600)
            steps = CancelledAt(number, call(), when_done=False)
            with suppress(asyncio.CancelledError):
                assert asyncio.run(drive(steps)) is None
        assert redis.get(key) == b"somebody else"
        if steps.waited < number:
            break
    assert steps.waited > 1
    redis.delete(key)


def test_cancelled_twice(redis: Any, key: str) -> None:
    """The second time while the key is given back."""

    @only_one(NAME, timeout=600)
    async def work() -> None:
        await asyncio.sleep(LIMIT)

    async def cancel(twice: int) -> None:
        task = asyncio.ensure_future(work())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        task.cancel()
        for _ in range(twice):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(eventually, lambda: not redis.exists(key))

    for twice in range(4):
        asyncio.run(cancel(twice))
        assert not held()


def open_files() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


def loops() -> int:
    """How many event loops are alive."""
    gc.collect()
    # Not by isinstance, which would ask those that weak proxies stand for, and that are gone.
    return sum(issubclass(type(each), asyncio.AbstractEventLoop) for each in gc.get_objects())


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="open files cannot be counted")
def test_one_event_loop_after_the_other(redis: Any, key: str) -> None:
    begun = threading.Event()

    @only_one(NAME)
    async def work() -> str:
        return "done"

    @only_one(NAME)
    async def never() -> None:
        begun.set()
        await asyncio.sleep(LIMIT)

    async def cancelled() -> str:
        begun.clear()
        task = asyncio.ensure_future(never())
        # Not by the key alone: a cancellation that comes with the reply may be lost by redis-py.
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key) and begun.is_set())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await work() or ""

    def both() -> None:
        assert asyncio.run(work()) == "done"
        assert asyncio.run(cancelled()) == "done"

    for _ in range(3):
        both()

    def are_open() -> list[int]:
        return [open_files(), loops(), len(redis.client_list())]

    before = are_open()
    for _ in range(20):
        both()
    # Some connections may be the renewing thread's; it is one for each loop that must not be left.
    assert eventually(lambda: all(now < was + 10 for now, was in zip(are_open(), before, strict=True))), before
    assert not redis.exists(key)


def test_clients_of_closed_loops_are_forgotten(redis_url: str) -> None:
    """Those that were not shut down before, so that nothing else has told us."""
    server = Server(redis_py.Redis.from_url(redis_url))
    loops = [asyncio.new_event_loop() for _ in range(3)]
    first, second = (loop.run_until_complete(server.async_client()) for loop in loops[:2])
    assert first is not second
    loops[0].close()
    loops[2].run_until_complete(server.async_client())
    assert [*server._async_clients] == loops[1:]
    assert loops[1].run_until_complete(server.async_client()) is second
    for loop in loops[1:]:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_threads_that_each_run_an_event_loop_of_their_own(redis_url: str) -> None:
    """While one forgets the client of a closed loop, another does."""
    server = Server(redis_py.Redis.from_url(redis_url))
    others = [threading.Thread(target=lambda: asyncio.run(server.async_client()))]

    class Left(asyncio.SelectorEventLoop):
        def is_closed(self) -> bool:
            if is_left and others:
                other = others.pop()
                other.start()
                other.join(LIMIT)
            return super().is_closed()

    is_left, loop = False, Left()
    loop.run_until_complete(server.async_client())
    loop.close()
    is_left = True
    asyncio.run(server.async_client())
    assert not others
    assert loop not in server._async_clients


def renewing_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "only_one-leases"]


def test_many_runs_share_one_thread(redis: Any, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In two event loops at a time, and they are renewed while these are busy.

    By a client without time-outs, as a loop that opens many connections at once answers late.
    """
    monkeypatch.setattr(renewal, "_renewer", renewal._Renewer())  # other tests have left threads of their own
    of_others = len(renewing_threads())
    many = 50
    keys = [f"{prefix}{number}" for number in range(2 * many)]
    waiting, renewed = threading.Barrier(3), threading.Event()

    client = redis_py.Redis.from_url(redis_url)

    @only_one("{number}", lease=60, redis=client)
    async def work(number: int, begun: list[int], all_have: asyncio.Event, enough: asyncio.Event) -> bool:
        begun.append(number)
        if len(begun) == many:
            all_have.set()
        await enough.wait()
        return current_lock().is_held

    async def some(numbers: range) -> list[bool | None]:
        begun: list[int] = []
        all_have, enough = asyncio.Event(), asyncio.Event()
        runs = [asyncio.ensure_future(work(number, begun, all_have, enough)) for number in numbers]
        await all_have.wait()
        # Not awaited: neither loop gets a turn before the test says so.
        waiting.wait(LIMIT)
        renewed.wait(LIMIT)
        enough.set()
        return list(await asyncio.gather(*runs))

    with ThreadPoolExecutor(2) as pool:
        loops = [pool.submit(asyncio.run, some(range(first, first + many))) for first in (0, many)]
        waiting.wait(LIMIT)
        try:
            locks = held()
            assert sorted(lock.key for lock in locks) == sorted(keys)
            for key in keys:
                redis.pexpire(key, 30_000)
            renew_now(*locks)
            assert eventually(lambda: all(redis.pttl(key) > 30_000 for key in keys))
            assert len(renewing_threads()) == of_others + 1
        finally:
            renewed.set()
        assert [loop.result(LIMIT) for loop in loops] == [[True] * many] * 2
    client.close()
    assert redis.exists(*keys) == 0
    assert not held()


@pytest.mark.parametrize(("value", "reason"), [(None, "deleted"), (b"somebody else", "taken")])
def test_a_run_that_fails_when_it_has_lost_its_key_is_cancelled(
    redis: Any, key: str, value: bytes | None, reason: str
) -> None:
    seen: list[str] = []

    @only_one(NAME, lease=60, when_lost=fail)
    async def work() -> None:
        try:
            redis.set(key, value) if value else redis.delete(key)
            renew_now(current_lock())
            await asyncio.sleep(LIMIT)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main() -> str:
        with pytest.raises(LockLost, match=reason):
            await work()
        await asyncio.sleep(0)  # nothing of the cancellation is left
        return "went on"

    assert asyncio.run(main()) == "went on"
    assert seen == ["cancelled"]
    assert redis.get(key) == value
    redis.delete(key)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="cancellations are counted from Python 3.11")
def test_a_run_that_is_cancelled_by_others_is_cancelled(redis: Any, key: str) -> None:
    """Though it would fail when it has lost its key, and has lost it as well."""

    @only_one(NAME, lease=60, when_lost=fail)
    async def work() -> None:
        await asyncio.sleep(LIMIT)

    async def main() -> None:
        task = asyncio.ensure_future(work())
        assert await asyncio.to_thread(eventually, lambda: redis.exists(key))
        redis.delete(key)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


@pytest.mark.parametrize("most", [1, 10, None])
@pytest.mark.parametrize("kind", KINDS)
def test_more_calls_at_a_time_than_connections(kind: str, most: int | None, prefix: str) -> None:
    """They wait for one another, as threads do; each has a key of its own, and all run."""
    many = MANY if kind == "plain" else MANY // 10
    options: dict[str, Any] = {} if most is None else {"max_connections": most}
    options |= {"socket_timeout": LIMIT, "socket_connect_timeout": LIMIT}  # after which redis-py connects again

    async def work(number: int) -> int:
        assert current_lock().is_held
        return number

    async def all_at_once(call: Any) -> Any:
        return await asyncio.gather(*(call(number) for number in range(many)))

    with clients(kind) as those, those.connected(**options) as client:
        call = only_one(work, key="{number}", timeout=600, redis=client)
        begun = those.witness.info("stats")["total_connections_received"]
        assert asyncio.run(all_at_once(call)) == list(range(many))
        opened = those.witness.info("stats")["total_connections_received"] - begun
        assert opened <= (most or many) + OTHERS
        assert not those.witness.keys(f"*{prefix}*")


def test_calls_that_wait_for_a_connection_to_a_server_that_is_down(redis_url: str, prefix: str) -> None:
    """Those that have one find out, each twice, as they are told to; none of those that wait asks again."""
    assert prefix
    with Proxy(redis_url) as proxy:
        proxy.lose_request("SET", times=MANY, then="hang")
        with redis_py.Redis.from_url(proxy.url, max_connections=2, socket_timeout=0.5) as client:

            async def all_at_once() -> Any:
                calls = (call(number) for number in range(50))
                return await asyncio.gather(*calls, return_exceptions=True)

            async def work(number: int) -> int:
                return number

            call = only_one(work, key="{number}", timeout=600, redis=client)
            results = asyncio.run(all_at_once())
        assert {type(each) for each in results} == {LockUnavailable}
        assert proxy.commands.count("SET") <= 4


@pytest.mark.parametrize("kind", OF_ONE_SERVER)
def test_a_command_whose_connection_is_closed_is_sent_once_more(redis_url: str, key: str, kind: str) -> None:
    def get() -> Commands[Any]:
        return (yield ("GET", key))

    async def main(client: Any) -> Any:
        asyncio_client = make_async_client(client)
        try:
            return await drive_async(asyncio_client, get())
        finally:
            await asyncio_client.aclose()

    with Proxy(redis_url) as proxy, OF_ONE_SERVER[kind](proxy.url) as client:
        proxy.lose_request("GET")
        assert asyncio.run(main(client)) is None
        assert proxy.commands.count("GET") == 2


def test_a_command_without_a_reply_while_others_have_theirs() -> None:
    """The server is not down then: what waits for the connection has its turn."""

    class Client:
        """Of which one command ends when the test says so, and one never."""

        async def execute_command(self, command: str) -> str:
            if command == "times out":
                await time_is_over.wait()
                raise redis_py.TimeoutError
            if command == "takes long":
                await asyncio.Event().wait()
            return command

    async def main() -> None:
        twin = AsyncClient(Client, 2)

        def send(command: str) -> asyncio.Task[Any]:
            return asyncio.create_task(twin.execute_command(command))

        timed_out = send("times out")
        assert await send("first") == "first"
        takes_long, waits = send("takes long"), send("waits")
        await asyncio.sleep(0)
        time_is_over.set()
        with pytest.raises(redis_py.TimeoutError):
            await timed_out
        assert await waits == "waits"
        takes_long.cancel()

    time_is_over = asyncio.Event()
    asyncio.run(main())


def test_a_command_that_ends_when_its_client_has_been_left() -> None:
    """As another was interrupted: it may have connected once more, and the next command closes that."""
    closed: list[Any] = []

    class Client:
        """Of which one command ends when the test says so, and one is interrupted."""

        async def execute_command(self, command: str) -> str:
            if command == "late":
                await goes_on.wait()
            if command == "interrupted":
                raise KeyboardInterrupt
            return command

        async def aclose(self) -> None:
            closed.append(self)

    async def main() -> None:
        twin = AsyncClient(Client, 2)
        before = twin.client
        late = asyncio.create_task(twin.execute_command("late"))
        await asyncio.sleep(0)
        with pytest.raises(KeyboardInterrupt):
            await twin.execute_command("interrupted")
        assert await twin.execute_command("next") == "next"
        assert closed == [before]
        goes_on.set()
        assert await late == "late"
        closed.clear()
        assert await twin.execute_command("next") == "next"
        assert set(closed) == {before}
        closed.clear()
        assert await twin.execute_command("next") == "next"
        assert not closed

    goes_on = asyncio.Event()
    asyncio.run(main())


def test_a_call_that_is_cancelled_while_it_waits_for_a_connection(redis: Any, redis_url: str, prefix: str) -> None:
    """It takes no connection from those that wait behind it."""
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url, max_connections=1) as client:

        async def work(number: int) -> int:
            return number

        async def cancel_in_the_middle() -> Any:
            call: Any = only_one(work, key="{number}", timeout=600, redis=client)
            assert await call(0) == 0
            held_up = proxy.hold_up("SET")
            tasks = [asyncio.create_task(call(number)) for number in range(5)]
            assert await asyncio.to_thread(held_up.met.wait, LIMIT)
            for task in tasks[1:4]:
                task.cancel()
            held_up.let_go()
            return await asyncio.gather(*tasks, return_exceptions=True)

        results = asyncio.run(cancel_in_the_middle())
        assert [results[0], results[4]] == [0, 4]
        assert {type(each) for each in results[1:4]} == {asyncio.CancelledError}
    assert eventually(lambda: not redis.keys(f"{prefix}*"))
