"""Exceptions out of nowhere: a soft time limit or Ctrl-C may be raised at any line of ours, and leaves nothing behind.

Here they are raised at every place in turn, found by tracing a call.
What is raised before the reply to a command is in `connections/test_interruptions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from only_one import AlreadyRunning, ConfigurationError, current_lock, events, fail, only_one
from only_one.lock import renewal
from rigs.waiting import LIMIT, eventually
from tests.decorated import as_async, token_of_the_dead
from tests.interruptions import EVERY_INSTRUCTION_IS_TRACED, AtPlace, Interruption, interrupt, raises, traced

pytestmark = [pytest.mark.interrupts, pytest.mark.timeout(method="thread")]  # as SIGALRM is ours

MOST = 3000
"""Places in one call; there are a few hundred."""

SOMEBODY_ELSE = b"somebody else"
DEAD = token_of_the_dead()
RETAINED = b"retained"
"""Stands for a value that `at_least` retains, for no longer than a run that has succeeded would."""


def work(which: str) -> str:
    return "done" if which else ""


def nothing_is_held() -> bool:
    """Whether the run is over, for all that can be seen of it in here."""
    with suppress(ConfigurationError):
        if current_lock().is_held:
            return False
    return not renewal._renewer.held()


def is_interrupted(place: AtPlace, call: Callable[[], object]) -> bool:
    """Whether a call with an interruption raises it; nothing is held after it."""
    try:
        with suppress(AlreadyRunning), traced(place):
            call()
    except (Interruption, SoftTimeLimitExceeded):
        return True
    finally:
        assert nothing_is_held(), place.where
    return False


def value_at(client: Any, key: str) -> bytes | None:
    value: bytes | None = client.get(key)
    is_retained = value is not None and b'"kept"' in value
    return RETAINED if is_retained and client.pttl(key) <= 300_000 else value


def check_every_place(
    client: Any,
    prefix: str,
    call: Callable[[str], Any],
    *,
    then: Callable[[], object] = interrupt,
    stored: bytes | None = None,
    left: Collection[bytes | None] = (None,),
    gives: Any = "done",
    is_raised: bool = True,
) -> None:
    """Interrupt a call at each place in turn, until it comes through without.

    Args:
        client: a client of the server.
        prefix: what the keys begin with: each call has its number as key, so that no call waits for one before it.
        call: the call, which is given its key.
        then: what interrupts it.
        stored: what is stored at the key before the call.
        left: of which one is stored at the key some time after the call.
        gives: what an undisturbed call gives; one is made after each interruption, as it must not be told of that.
        is_raised: whether what interrupts it raises.
    """
    interrupted = 0
    for number in range(1, MOST):
        if stored is not None:
            client.set(f"{prefix}{number}", stored, px=600_000)
        place = AtPlace(number, then)
        # In a context of its own: what `current_lock()` gives after an interruption is not for other tests.
        interrupted += copy_context().run(is_interrupted, place, partial(call, str(number)))
        print(f"interrupted at {place.where}, place {number}")  # shown when it fails
        client.delete(f"{prefix}after")
        assert call("after") == gives
        if not place.where:
            break
    else:
        pytest.fail(f"there are more than {MOST} places")
    assert number > 20
    assert (interrupted > 20) is is_raised
    for key in [f"{prefix}{each}" for each in range(1, number + 1)]:
        assert eventually(partial(lambda key: value_at(client, key) in left, key)), (key, client.get(key))


@pytest.mark.parametrize(
    ("options", "stored", "left", "then"),
    [
        ({"lease": 600}, None, [None], interrupt),
        ({"timeout": 600}, None, [None], interrupt),
        ({"timeout": 600}, None, [None], raises(SoftTimeLimitExceeded)),
        ({"timeout": 600, "at_least": 300}, None, [None, RETAINED], interrupt),
        ({"timeout": 600}, SOMEBODY_ELSE, [SOMEBODY_ELSE], interrupt),
        ({"timeout": 600, "when_busy": fail}, SOMEBODY_ELSE, [SOMEBODY_ELSE], interrupt),
        ({"timeout": 600}, DEAD, [None, DEAD], interrupt),
    ],
    ids=["lease", "timeout", "Celery's time limit", "at_least", "busy and skips", "busy and fails", "takes over"],
)
def test_a_call_that_is_interrupted(
    redis: Any, prefix: str, then: Any, options: Any, stored: Any, left: Any, happened: Any, monkeypatch: Any
) -> None:
    """With somebody who hears of its events, so that there are more lines to be interrupted at."""
    monkeypatch.setattr(events.logger, "disabled", True)  # or most places of a takeover are those of the log
    decorated = only_one(work, key="{which}", **options)
    assert decorated("first") == "done"
    check_every_place(redis, prefix, decorated, then=then, stored=stored, left=left)
    assert happened


@pytest.mark.skipif(not EVERY_INSTRUCTION_IS_TRACED, reason="tracing does not show every instruction there")
def test_a_first_call_that_is_interrupted(redis: Any, prefix: str) -> None:
    """Not at every line: tracing can raise between the end of a `with` block and its exit, and no signal can."""

    def first_call(which: str) -> Any:
        return only_one(work, key="{which}", timeout=600)(which)

    check_every_place(redis, prefix, first_call)


@pytest.mark.filterwarnings("ignore:.*never awaited:RuntimeWarning")  # interrupted between its call and the await
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_async_call_that_is_interrupted(redis: Any, prefix: str) -> None:
    work_async = only_one(as_async(work), key="{which}", timeout=600)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work_async("first"))
        check_every_place(redis, prefix, lambda which: loop.run_until_complete(work_async(which)))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


@pytest.mark.timeout(LIMIT, method="thread")  # it would wait without end
@pytest.mark.parametrize("first", [False, True], ids=["later calls", "first calls"])
@pytest.mark.parametrize("times", [{"timeout": 600}, {"lease": 600}], ids=["timeout", "lease"])
def test_a_handler_that_calls_a_decorated_function_at_every_place(
    redis: Any, prefix: str, times: dict[str, Any], *, first: bool
) -> None:
    """It waits for nothing that the interrupted call holds, and returns to it."""
    results: list[Any] = []
    functions = [only_one(work, key="{which}", **times) for _ in range(2)]

    def call(which: str, number: int = 0) -> Any:
        function = only_one(work, key="{which}", **times) if first else functions[number]
        results.append(function(which))
        return results[-1]

    handle = partial(call, "inner", 1)
    assert (call("first"), handle()) == ("done", "done")
    check_every_place(redis, prefix, call, then=handle, is_raised=False)
    assert {*results} == {"done"}
