"""What type checkers refuse: never run, but checked by mypy and pyright, which tell of a comment that is not needed."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from only_one import configure, current_lock, fail, only_one, subscribe
from only_one.events import Event
from tests.typing.accepted import plain, plain_async, who, why

decorated, decorated_async = only_one("k")(plain), only_one("k")(plain_async)


async def calls() -> None:
    """The parameters are those of the function."""
    decorated()  # type: ignore[call-arg]
    decorated("x")  # type: ignore[arg-type]
    decorated(1, c=3)  # type: ignore[call-arg]
    only_one(plain, key="k", timeout=3)()  # type: ignore[call-arg]
    await decorated_async("x")  # type: ignore[arg-type]
    await decorated(1)  # type: ignore[misc]


async def results() -> None:
    """A call may have been skipped."""
    skipped: float = decorated(1)  # type: ignore[assignment]
    skipped = await decorated_async(1)  # type: ignore[assignment]
    sure: float = only_one("k", when_busy=fail)(plain)(1)
    sure = only_one("k", when_busy=lambda _: "busy")(plain)(1)  # type: ignore[assignment]
    sure = only_one("k", when_busy=fail, when_down=lambda _: None)(plain)(1)  # type: ignore[assignment]
    decorated(1).is_integer()  # type: ignore[union-attr]
    decorated_async(1) + 1  # type: ignore[operator]
    del skipped, sure


def options() -> None:
    """What a decorator takes."""
    only_one("k", "300")  # type: ignore[call-overload]
    only_one("k", work_id="7")  # type: ignore[call-overload]
    only_one("k", 300, 30)  # type: ignore[call-overload]
    only_one(key=3)  # type: ignore[call-overload]
    only_one("k", key="k")  # type: ignore[call-overload]
    only_one("k", nope=1)  # type: ignore[call-overload]
    only_one("k", when_busy="skip")  # type: ignore[call-overload]
    only_one("k", when_busy=lambda: None)  # type: ignore[arg-type, misc]
    only_one("k", when_busy=why)  # type: ignore[arg-type]
    only_one("k", when_down=who)  # type: ignore[arg-type]
    only_one("k")(3)  # type: ignore[call-overload]


def the_rest() -> None:
    """What settings, hooks and locks take."""
    configure("redis://localhost")  # type: ignore[call-arg]
    configure(timeout="300")  # type: ignore[arg-type]
    configure(nope=1)  # type: ignore[call-arg]
    subscribe(3)  # type: ignore[arg-type]
    subscribe(lambda: None)  # type: ignore[arg-type, misc]
    subscribe(who)  # type: ignore[arg-type]
    current_lock().is_held = True  # type: ignore[misc]


def hook(event: Event) -> None:
    """Events are frozen."""
    event.key = "another"  # type: ignore[misc]
