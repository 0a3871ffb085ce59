"""What type checkers know of decorated functions: never run, but checked by mypy and pyright."""

# pyright: reportUnnecessaryTypeIgnoreComment=true
# ruff: noqa: ARG001, ARG005 - nothing here is ever called

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from redis import Redis

from only_one import carry_on, configure, current_lock, fail, only_one, retry, subscribe
from only_one.errors import AlreadyRunning, LockLost, LockUnavailable
from only_one.events import Acquired, Busy, Event, Lost, Reclaimed
from only_one.holder import Holder

if TYPE_CHECKING:
    from typing_extensions import assert_type  # noqa: TC004 - on 3.10 it is not there when the tests run

T = TypeVar("T")

# --- every form keeps the parameters, and adds what a skip gives ---------------------------------------------------


@only_one
def bare(a: int, b: str = "x", *rest: bytes, c: float = 1) -> float:
    """With parameters of each kind."""
    return c


@only_one
def bare_generic(a: T) -> list[T]:
    """Of any type."""
    return [a]


def plain(a: int, b: str = "x") -> float:
    """Decorated below."""
    return a


async def plain_async(a: int, b: str = "x") -> float:
    """Decorated below."""
    return a


async def forms() -> None:
    """Each way to decorate, and what is awaited."""
    assert_type(bare(1, "x", b"", c=2.0), float | None)
    assert_type(bare_generic(1), list[int] | None)
    assert_type(only_one(plain, key="k", timeout=300)(1, b="y"), float | None)
    assert_type(only_one("k")(plain)(1, "y"), float | None)
    assert_type(only_one("k")(lambda: "x")(), str | None)
    assert_type(only_one(key="k", timeout=300.5, work_id=lambda a, b: a)(plain)(a=1), float | None)
    assert_type(await only_one(key=lambda a, b: f"k{a}")(plain_async)(a=1), float | None)
    await assert_type(only_one(plain_async)(1), Coroutine[Any, Any, float | None])


# --- what policies add ---------------------------------------------------------------------------------------------


def who(error: AlreadyRunning) -> str:
    """A policy for busy keys."""
    return error.key


def why(error: LockUnavailable) -> bytes:
    """A policy for servers that are down."""
    return error.key.encode()


async def policies() -> None:
    """The types follow by themselves, of what is awaited, too."""
    assert_type(only_one("k", when_busy=fail)(plain)(1), float)
    assert_type(only_one("k", when_busy=who)(plain)(1), float | str)
    assert_type(only_one("k", when_busy=lambda error: error.task_id)(plain)(1), float | str | None)
    assert_type(only_one("k", when_busy=fail, when_down=carry_on)(plain)(1), float)
    again = retry(5, max_retries=3)
    assert_type(only_one("k", when_busy=again, when_down=retry(timedelta(seconds=9)))(plain)(1), float)
    assert_type(only_one("k", when_busy=who, when_lost=lost, when_down=why)(plain)(1), float | str | bytes)
    assert_type(await only_one("k", when_busy=fail, when_down=why)(plain_async)(1), float | bytes)
    assert_type(await only_one(plain_async, key="k", when_busy=fail, when_down=carry_on)(1), float)


# --- methods -------------------------------------------------------------------------------------------------------


class Feed:
    """Has decorated methods of every kind."""

    @only_one("feed:{self.url}")
    def load(self, a: int) -> float:
        """A method."""
        return a

    @only_one("feed:{self.url}", when_busy=fail)
    async def load_async(self, a: int) -> float:
        """An async method."""
        return a


async def methods(feed: Feed) -> None:
    """What methods give."""
    assert_type(feed.load(1), float | None)
    assert_type(await feed.load_async(1), float)


# --- the rest ------------------------------------------------------------------------------------------------------


def lost(error: LockLost) -> None:
    """A policy for losses, which asks who has the key."""
    assert_type(error.holder, Holder | None)
    assert_type(current_lock().fence, int)


def settings(client: Redis) -> None:
    """Everything that can be set."""
    configure(redis="redis://localhost", prefix="app:", timeout=300, lease=timedelta(seconds=10), when_busy=fail)
    configure(redis=client, timeout=None, when_busy=who, active=False)


def hook(event: Event) -> None:
    """Listens to everything, and what ends that."""
    if isinstance(event, (Acquired, Busy, Lost, Reclaimed)):
        assert_type(event.holder, Holder | None)
    assert_type(subscribe(hook), Callable[[], None])


# --- a task stays a task ------------------------------------------------------------------------------------------


class FeedTask:
    """What has the shape of a Celery task, which has no types of its own."""

    def __call__(self, url: str) -> int:
        """Run it here."""
        return len(url)

    def apply_async(self, args: tuple[str, ...], countdown: float = 0) -> str:
        """Queue it."""
        return str((args, countdown))


def tasks(feed: FeedTask, unknown: Any) -> None:
    """Unique from queued to finished."""
    assert_type(only_one("k")(feed), FeedTask)
    assert_type(only_one(feed, key="k", timeout=5), FeedTask)
    assert_type(only_one("k")(unknown).delay(1), Any)
