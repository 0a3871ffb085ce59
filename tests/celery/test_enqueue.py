"""The decorator above a task, where there is no worker: what is published, what is not, and what becomes of the key."""

from __future__ import annotations

import logging
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta, timezone
from json import loads
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import Task
from celery.beat import ScheduleEntry, Scheduler
from celery.result import AsyncResult, EagerResult, GroupResult
from celery.schedules import schedule
from celery.signals import after_task_publish, before_task_publish
from kombu.exceptions import EncodeError, OperationalError
from pydantic import BaseModel

from only_one import AlreadyRunning, Busy, LockUnavailable, configure, current_lock
from only_one.celery.coalescing import triggers_of
from only_one.celery.requeue import Header
from only_one.lock import renewal
from only_one.policies import buffer_one, carry_on, fail, retry, skip
from rigs.proxy import Proxy
from rigs.waiting import eventually
from tests.celery.deliveries import QUEUE_TIMEOUT, SLACK, Keys, Queue, done, token_of, unique
from tests.decorated import CLOSED, events
from tests.renewal import later

pytestmark = pytest.mark.usefixtures("redis")


@contextmanager
def about_to_publish(task: Any, do: Callable[[], None], signal: Any = before_task_publish) -> Iterator[None]:
    """Do something between the moment when the key is acquired and the one when the message is sent, or just after."""

    def heed(**_: Any) -> None:
        do()

    signal.connect(heed, sender=task.name, weak=False)
    try:
        yield
    finally:
        signal.disconnect(heed, sender=task.name)


# Duplicates


def test_a_duplicate_is_not_published_and_gets_the_result_of_the_existing_task(queue: Queue, keys: Keys) -> None:
    task = unique(queue.app, "k-{value}")
    first, second = task.delay(1), task.apply_async((1,), countdown=5)
    holder = keys.holder("k-1")
    assert (holder.state, holder.task_id, holder.name, holder.attempt) == ("queued", first.id, task.name, 0)
    assert (first.is_duplicate, first.holder) == (False, None)
    assert (second.is_duplicate, second.holder) == (True, holder)
    assert second == first
    assert (second.app, second.backend, second.state) == (first.app, first.backend, "PENDING")
    assert task.delay(2) != first
    assert len(queue) == 2


HELD = {
    "foreign": "somebody else",
    "function": token_of(None, attempt=None),
    "job": token_of("job-7", attempt=None),
    "job of another queue": token_of("job-7", queue="rq"),
}


@pytest.mark.parametrize("value", HELD.values(), ids=HELD)
@pytest.mark.parametrize(("options", "is_duplicate"), [({}, False), ({"when_busy": buffer_one()}, True)])
def test_only_a_task_has_duplicates(queue: Queue, keys: Keys, value: Any, options: Any, *, is_duplicate: bool) -> None:
    """While another holder has the key, a task is published, and the worker decides."""
    keys["k"] = value
    before = keys["k"]
    task = unique(queue.app, "k", **options)
    results = [task.delay(1), task.delay(1)]
    assert "job-7" not in {each.id for each in results}
    assert [(each.is_duplicate, each.holder) for each in results] == [(False, None), (is_duplicate, None)]
    assert len(queue) == 2 - is_duplicate
    assert keys["k"] == before
    assert keys.lives_for(600)


def test_a_duplicate_whose_result_cannot_be_had_is_logged_once(new_app: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Where the backend gives a result only to the process that has queued the task."""
    for backend, times in [("rpc://", 1), ("cache+memory://", 0)]:
        task = unique(new_app(broker_url="memory://", result_backend=backend), f"{backend}-{{value}}")
        caplog.clear()
        first, *others = [task.delay(value) for value in (1, 1, 1)]
        assert others == [first, first]
        for value in (2, 3):
            task.delay(value)
        warnings = [each for each in caplog.messages if "may wait for ever" in each]
        assert len(warnings) == times
        assert all(each.startswith(f"{first.id} was queued already: ") for each in warnings)
        assert all(each.endswith(" a result backend that stores results, such as Redis") for each in warnings)


@pytest.mark.parametrize("takeover", [True, False])
@pytest.mark.parametrize("state", ["queued", "received", "running"])
def test_a_queued_task_alone_outlives_its_process(queue: Queue, keys: Keys, state: str, *, takeover: bool) -> None:
    """It waits, though its producer has died; any other task has died with its process."""
    keys["k"] = token_of("another", state=state, is_dead=True)
    result = unique(queue.app, "k", takeover=takeover).delay()
    is_taken_over = takeover and state != "queued"
    assert (result.id != "another", len(queue)) == (is_taken_over, is_taken_over)
    assert (keys.holder().task_id, keys.holder().state) == (result.id, "queued" if is_taken_over else state)


# Policies


def test_what_a_duplicate_gets_by_its_policy(queue: Queue, keys: Keys) -> None:
    first = unique(queue.app, "k").delay()
    with pytest.raises(AlreadyRunning) as raised:
        unique(queue.app, "k", when_busy=fail).delay()
    error = raised.value
    assert (error.task_id, error.key, error.holder) == (first.id, f"{keys.prefix}k", keys.holder())
    assert unique(queue.app, "k", when_busy=skip).delay() is None
    own = unique(queue.app, "k", when_busy=lambda error: queue.app.AsyncResult(error.task_id)).delay()
    assert (own.is_duplicate, own.holder.task_id) == (True, first.id)
    with configure(when_busy=retry()):  # which is for tasks that run
        assert unique(queue.app, "k").delay() == first
    assert unique(queue.app, "k", when_busy=lambda error: retry()(error) if error.holder else None).delay() == first
    assert len(queue) == 1
    # The newest call is not lost: the worker puts it behind the run, and drops older ones that wait there.
    newest = unique(queue.app, "k", when_busy=lambda error: buffer_one()(error) if error.holder else None).delay()
    assert (newest == first, newest.is_duplicate, newest.holder, len(queue)) == (False, False, None, 2)
    with configure(active=False):
        assert not unique(queue.app, "k").delay().is_duplicate


# Trouble


# Celery would wait two seconds for it to come back.
DOWN = {"broker_url": CLOSED, "broker_transport_options": {"interval_start": 0, "max_retries": 1}}
TROUBLE: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "the broker is down": (OperationalError, DOWN, 1),
    "it cannot be encoded": ((EncodeError, TypeError), {}, object()),
    "a signal handler raises": (KeyboardInterrupt, {}, 1),
    "a signal handler raises, and the server is away": (KeyboardInterrupt, {}, 1),
}


@pytest.mark.parametrize("policy", [{}, {"when_busy": buffer_one()}], ids=["unique", "buffer_one"])
@pytest.mark.parametrize("how", TROUBLE)
def test_a_task_that_is_not_published_has_no_key(
    new_app: Any, queue: Queue, keys: Keys, way: Proxy, policy: Any, how: str
) -> None:
    """So it keeps no other from its queue; if it could not be released then, it is in the background."""

    def look() -> None:
        had_key.append("k" in keys)
        if how.endswith("away"):
            keys.redis.pexpire(f"{keys.prefix}k", 600_000)  # no expiry explains within this test that it is free
            stack.enter_context(way.refused())
        if how.startswith("a signal handler"):
            raise KeyboardInterrupt

    error, settings, value = TROUBLE[how]
    had_key: list[bool] = []
    task, again = (unique(new_app(**each), "k", celery={"name": "published"}, **policy) for each in (settings, {}))
    with ExitStack() as stack:
        with about_to_publish(task, look), pytest.raises(error):
            task.delay(value)
        assert had_key == [not policy]
        assert ("k" in keys) == (how.endswith("away") and not policy)
    assert eventually(lambda: "k" not in keys)
    with later(60):
        assert eventually(lambda: not renewal._renewer.pending_releases)  # it is not looked for any more
    assert again.delay(1) == again.delay(1)
    assert len(queue) == 1


@pytest.mark.parametrize("policy", [{}, {"when_busy": buffer_one()}], ids=["unique", "buffer_one"])
def test_a_server_that_is_down_is_not_published_past(queue: Queue, policy: Any) -> None:
    for options in ({}, {"when_down": retry()}):
        with pytest.raises(LockUnavailable):
            unique(queue.app, "k", redis=CLOSED, **policy, **options).delay()
    assert unique(queue.app, "k", redis=CLOSED, when_down=type, **policy).delay() is LockUnavailable
    assert len(queue) == 0
    task = unique(queue.app, "k", redis=CLOSED, when_down=carry_on, **policy)
    assert task.delay() != task.delay()
    assert len(queue) == 2


REFUSED: list[Any] = [((1, 2, 3),), ((), {"wrong": 1}), ((1,), {"value": 1}), ((), {}, *[None] * 6)]
NO_ARGUMENTS: list[Any] = [("ab",), ((), [("value", 1)])]


@pytest.mark.parametrize("template", ["k", "k-{value}"])
@pytest.mark.parametrize("given", REFUSED + NO_ARGUMENTS, ids=str)
def test_what_celery_refuses_raises_and_leaves_no_key(queue: Queue, keys: Keys, template: str, given: Any) -> None:
    """What are no arguments are refused to a duplicate, too."""
    task = unique(queue.app, template)
    for number in range(2 if given in NO_ARGUMENTS else 1):
        with pytest.raises(TypeError):
            task.apply_async(*given)
        with pytest.raises(TypeError):
            task.apply_async((), {}, None, task_id="x")
        assert (len(queue), len(keys.redis.keys(f"{keys.prefix}k*"))) == (number, number)
        task.delay()


# How long the key lives in the queue


def in_(seconds: float) -> datetime:
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


EAST = timezone(timedelta(hours=5))
TEN_YEARS = 10 * 365 * 86_400
NEVER = datetime.max.replace(tzinfo=timezone.utc)
TIMES: dict[str, tuple[float, Any, Callable[[], Any]]] = {
    "by default": (QUEUE_TIMEOUT, {}, dict),
    "a longer timeout": (QUEUE_TIMEOUT, {"timeout": 72_000}, dict),
    "a lease": (QUEUE_TIMEOUT, {"lease": 5}, dict),
    "expires": (9000, {}, lambda: {"expires": 9000}),
    "expires in less than 30 s": (29, {}, lambda: {"expires": 29}),
    "expires at in the app's zone": (9000, {}, lambda: {"expires": in_(9000).replace(tzinfo=None)}),
    "expires at as text": (9000, {}, lambda: {"expires": in_(9000).isoformat()}),
    "the task expires": (9000, {"celery": {"expires": 9000}}, dict),
    "countdown": (9000 + QUEUE_TIMEOUT, {}, lambda: {"countdown": 9000}),
    "eta in the app's zone": (9000 + QUEUE_TIMEOUT, {}, lambda: {"eta": in_(9000).replace(tzinfo=None)}),
    "eta in another zone": (9000 + QUEUE_TIMEOUT, {}, lambda: {"eta": in_(9000).astimezone(EAST)}),
    "countdown and expires": (10_000, {}, lambda: {"countdown": 9000, "expires": 10_000}),
    "eta of another class": (9000 + QUEUE_TIMEOUT, {}, lambda: {"eta": SimpleNamespace(isoformat=in_(9000).isoformat)}),
    "never expires": (TEN_YEARS, {}, lambda: {"expires": NEVER}),
    "never begins": (TEN_YEARS, {}, lambda: {"eta": NEVER}),
}


@pytest.mark.parametrize(("seconds", "options", "call"), TIMES.values(), ids=TIMES)
def test_how_long_the_key_of_a_queued_task_lives(
    queue: Queue, keys: Keys, seconds: float, options: Any, call: Callable[[], Any]
) -> None:
    """From the call that is published; a duplicate does not lengthen it."""
    task = unique(queue.app, "k", **options)
    task.apply_async(**call())
    task.apply_async(expires=100_000)
    assert keys.lives_for(seconds)
    assert len(queue) == 1


def test_a_task_that_has_expired_already_keeps_no_other_from_its_queue(queue: Queue) -> None:
    task = unique(queue.app, "k")
    for expires in (-5, in_(-5), 0.0009, 0.001):
        task.apply_async(expires=expires)
    # The worker says that the first three were revoked.
    assert ["only_one" in message["headers"] for message in queue.messages()] == [False, False, False, True]


# What is always published


@pytest.mark.parametrize("option", ["task_id", "group_id", "link", "link_error", "chain", "chord"])
def test_a_task_whose_result_others_wait_for_is_always_published(queue: Queue, keys: Keys, option: str) -> None:
    """Celery's canvas is made of these options."""
    task = unique(queue.app, "k", when_busy=fail)
    first = task.delay()
    after = queue.app.task(done, name="after", shared=False).si()
    others = {"task_id": "an id", "group_id": "an id", "chain": [after]}
    published = task.apply_async(**{option: others.get(option, after)})
    assert (published != first, published.is_duplicate) == (True, False)
    assert len(queue) == 2
    assert keys.holder().task_id == first.id
    for when_down in (fail, skip):
        down = unique(queue.app, "k", redis=CLOSED, when_busy=buffer_one(), when_down=when_down)
        assert not down.apply_async(**{option: others.get(option, after)}).is_duplicate
    assert len(queue) == 4


def test_a_task_sent_by_name_or_sent_again_is_always_published(queue: Queue) -> None:
    task = unique(queue.app, "k", celery={"name": "named"})
    first = task.delay()
    queue.app.send_task("named")
    carried = Header(first.id, 0, times=1, key="another").as_headers()
    task.apply_async((1,), task_id=first.id, headers=carried)
    task.apply_async(retries=1)
    assert queue.messages()[2]["headers"]["only_one"] == carried["only_one"]
    assert len(queue) == 4


@pytest.mark.parametrize(
    ("options", "error"), [({"when_busy": fail}, AlreadyRunning), ({"redis": CLOSED}, LockUnavailable)]
)
def test_a_refused_linked_task_fails_alone(queue: Queue, keys: Keys, options: Any, error: type[Exception]) -> None:
    """A worker calls it when that task is done, and would store the error in place of its result."""
    before = queue.app.task(done, name=f"task-{uuid4()}", shared=False)
    linked = unique(queue.app, "k", **options)
    answer = before.apply_async(link=linked.si())
    keys["k"] = "somebody else"
    assert (queue.deliver(), answer.state, len(queue)) == ("done", "SUCCESS", 1)
    (message,) = queue.messages()
    queue.deliver()
    assert isinstance(linked.AsyncResult(message["headers"]["id"]).result, error)


@pytest.mark.parametrize("carried", [Header("of another task", 0, times=1).as_headers(), {"only_one": "by others"}])
def test_headers_copied_from_another_message_do_not_make_a_call_unique(queue: Queue, carried: Any) -> None:
    task = unique(queue.app, "k")
    answers = [task.apply_async(headers=carried) for _ in range(5)]
    assert len(set(answers)) == len(queue) == 1


# Without a queue


def test_always_eager(new_app: Any, busy: Any, queue: Queue, keys: Keys) -> None:
    app = new_app(task_always_eager=True)
    failing, skipped = unique(app, "k", timeout=60, when_busy=fail), unique(app, "k")
    answer = failing.apply_async((1,), expires=60)
    assert (type(answer), answer.is_duplicate) == (EagerResult, False)
    assert answer.get() == (1, "more", f"{keys.prefix}k")
    assert not keys.redis.keys(f"*{keys.prefix}*")  # nor anything beside it
    with busy("k"):
        for call in (failing.delay, failing.apply):
            with pytest.raises(AlreadyRunning):
                call().get()
    with keys.busy(token_of("of another task")):
        answer = skipped.delay()
    assert (type(answer), answer.get()) == (EagerResult, None)  # and not that of the other task
    assert len(queue) == 0


def test_called_directly_a_task_is_decorated_like_a_function(queue: Queue, new_app: Any, busy: Any, keys: Keys) -> None:
    def has_the_apps_timeout() -> bool:
        return keys.lives_for(500)

    for options in ({}, {"work_id": lambda: "a job"}):
        assert unique(new_app(only_one_timeout=500), "k", function=has_the_apps_timeout, **options)()
    task = unique(queue.app, "k")
    assert task(1) == task.run(1) == (1, "more", f"{keys.prefix}k")
    assert "k" not in keys
    with busy("k"):
        assert task(1) is None
    task.delay()
    assert task(1) == (1, "more", f"{keys.prefix}k")  # what waits in a queue has not begun


# Tasks of every kind


class Feed(BaseModel):
    key: str
    pages: int = 1


def modelled(feed: Feed) -> Feed:
    return Feed(key=current_lock().key, pages=feed.pages)


modelled.__annotations__.update(feed=Feed, **{"return": Feed})  # which Celery does not find in text


def test_a_task_with_a_model(new_app: Any, queue: Queue, keys: Keys) -> None:
    options: Any = {"function": modelled, "celery": {"pydantic": True}}
    task = unique(new_app(), "{feed[key]}", **options)
    first = task.delay({"key": "k", "pages": 3})
    assert task.delay(feed={"key": "k", "pages": 4}) == first
    if hasattr(task, "_dump_pydantic_arguments"):  # from Celery 5.7 on; no older one sends a model
        assert task.delay(Feed(key="k")) == first
    assert len(queue) == 1
    by_all = unique(new_app(), **options)
    assert by_all.delay({"key": "a"}) == by_all.delay({"key": "a"})
    assert len(queue) == 2
    for its, given in (({}, {"serializer": "pickle"}), ({"serializer": "pickle"}, {})):  # which carries it as it is
        pickled = unique(new_app(), "{feed.key}", function=modelled, celery={"pydantic": True, **its})
        pickled.apply_async((Feed(key="p"),), **given)
        assert keys.holder("p").name == pickled.name
        del keys["p"]
    eager = unique(new_app(task_always_eager=True), "{feed[key]}", **options)
    assert eager.delay({"key": "e", "pages": 3}).get() == {"key": f"{keys.prefix}e", "pages": 3}


def test_beat_logs_a_duplicate_in_one_line(queue: Queue, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    task = unique(queue.app, "k", celery={"name": "beaten"})
    queue.app.finalize()
    scheduler = Scheduler(app=queue.app, lazy=True)
    entry = ScheduleEntry(name="each", task="beaten", schedule=schedule(1), args=(), app=queue.app)
    wrong = ScheduleEntry(name="wrong", task="beaten", schedule=schedule(1), args=1, app=queue.app)
    assert scheduler.apply_async(entry, advance=False) == task.delay()
    with configure(when_busy=fail), caplog.at_level("WARNING"):
        scheduler.apply_entry(entry)
        scheduler.apply_entry(wrong)
        logging.getLogger("celery.beat").warning("it is %s", "late")
    assert len(queue) == 1
    ours, others, _ = caplog.records
    assert (ours.name, ours.levelname, ours.exc_info) == ("celery.beat", "ERROR", None)
    assert ours.getMessage().startswith(f"Couldn't apply scheduled task each: {keys.prefix}k is taken by beaten (task ")
    assert len(logging.Formatter().format(ours).splitlines()) == 1
    assert others.exc_info  # an error of another kind is logged as it was
    assert caplog.messages[-1] == "it is late"


# Options of apply_async


def test_options_by_their_position(queue: Queue) -> None:
    task = unique(queue.app, "k-{value}")
    after, instead = (queue.app.task(done, name=name, shared=False) for name in ("after", "instead"))
    with queue.app.producer_pool.acquire(block=True) as producer:
        given = ((1,), {"more": 2}, "mine", producer, after.s(), instead.s(), "shadow")
        task.apply_async(*given, headers=[("own", 1)])
    message = queue.take()
    assert {"id": "mine", "shadow": "shadow", "own": 1}.items() <= message["headers"].items()
    args, kwargs, embedded = loads(b64decode(message["body"]))
    assert (args, kwargs) == ([1], {"more": 2})
    assert [embedded[name][0]["task"] for name in ("callbacks", "errbacks")] == ["after", "instead"]


def publish_under_another_id(task: Any, *args: Any, **options: Any) -> Any:
    return Task.apply_async(task, *args, **{**options, "task_id": f"own-{uuid4()}"})


def publish_on_commit(task: Any, *args: Any, **options: Any) -> Any:
    """Of which the first transaction is rolled back."""
    is_first, task.is_first = getattr(task, "is_first", True), False
    return None if is_first else Task.apply_async(task, *args, **options)


def run_at_once(task: Any, args: Any, kwargs: Any, *, task_id: Any = None, **_: Any) -> Any:
    return task.apply(args, kwargs, task_id=task_id)


class Own(Task):  # type: ignore[misc]
    """Sends under an id of its own, and marks what is called through it."""

    abstract = True
    apply_async = publish_under_another_id

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return "own", super().__call__(*args, **kwargs)


@pytest.mark.parametrize("expires", [None, 29])  # less than the 30 s for which it is acquired until it is published
def test_the_key_has_the_id_that_was_published_by_the_task_s_base(queue: Queue, keys: Keys, expires: Any) -> None:
    """And the task keeps the methods of its base."""
    task = unique(queue.app, "k", celery={"base": Own})
    first = task.apply_async(expires=expires)
    assert first.id.startswith("own-")
    holder = keys.holder()
    assert (holder.task_id, keys.state()) == (first.id, ("queued", 0))
    assert holder.deadline - holder.since == pytest.approx(expires or QUEUE_TIMEOUT, abs=1)
    assert task.delay() == first
    assert len(queue) == 1
    assert task(2) == task.apply((2,)).get() == ("own", (2, "more", f"{keys.prefix}k"))


def test_a_task_with_an_id_of_its_base_s_that_ends_before_its_call_goes_on_is_over(queue: Queue, keys: Keys) -> None:
    """As where the broker confirms late, or a signal handler takes its time."""
    task = unique(queue.app, "k", celery={"base": Own})
    with about_to_publish(task, queue.deliver, signal=after_task_publish):
        first = task.delay()
    assert first.get()
    assert "k" not in keys


INSTEAD: dict[str, tuple[Callable[..., Any], float]] = {
    "it is published under another id": (publish_under_another_id, QUEUE_TIMEOUT),
    "it is published on commit": (publish_on_commit, 30),
    "a group is published": (lambda *_, **__: GroupResult("a group", []), 30),
    "several are published": (lambda *_, **__: [EagerResult("an id", 1, "SUCCESS")], 30),
    "it runs at once": (run_at_once, 0),
    "it runs at once under another id": (lambda task, *given, **_: run_at_once(task, *given), 0),
}
"""What a task's own `apply_async` does, and for how many seconds the key lives then."""


@pytest.mark.parametrize("how", INSTEAD)
def test_a_task_that_was_not_published_is_not_waited_for_an_hour(queue: Queue, keys: Keys, how: str) -> None:
    apply_async, seconds = INSTEAD[how]
    unique(queue.app, "k", celery={"apply_async": apply_async}).delay()
    assert keys.lives_for(seconds) if seconds else "k" not in keys


@pytest.mark.parametrize("apply_async", [publish_under_another_id, publish_on_commit, run_at_once])
def test_a_call_is_no_duplicate_of_a_task_that_is_not_published_with_its_own_id(queue: Queue, apply_async: Any) -> None:
    """It would get the result of an id that no task has."""
    task = unique(queue.app, "k", when_busy=buffer_one(), celery={"apply_async": apply_async})
    answers = [task.delay(1) for _ in range(2)]
    queue.deliver_all()
    assert [each.ready() for each in answers if each] == [True] * (1 if apply_async is publish_on_commit else 2)


# buffer_one


@pytest.mark.parametrize("replacement", [0, 1])
def test_each_task_of_buffer_one_is_numbered(queue: Queue, keys: Keys, replacement: int) -> None:
    """Also one that brings an id, and is published though an equal one waits."""
    task = unique(queue.app, "k", when_busy=buffer_one())
    task.delay(1)
    task.apply_async((1,), task_id="mine", replaced_task_nesting=replacement)
    first, second = (each["headers"]["only_one"] for each in queue.messages())
    assert 0 < first["trigger"] < second["trigger"]
    assert first["replacement"] == 0
    expected = Header("mine", 0, key=f"{keys.prefix}k", trigger=second["trigger"], replacement=replacement)
    assert second == expected.as_headers()["only_one"]


@pytest.mark.parametrize(
    ("given", "seconds", "requeued"),
    [
        ({}, 30, 330),
        ({"expires": 6000}, 30, 330),
        ({"expires": 20}, 20, 20),
        ({"countdown": 600}, 630, 330),
        ({"eta": in_(-5)}, 30, 330),
    ],
)
def test_the_newest_task_is_not_waited_for_when_it_has_expired_or_may_be_lost(
    queue: Queue, keys: Keys, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], seconds: float, requeued: float
) -> None:
    """By a purge, or with its worker: no key says so. The sender's clock is ahead of the server's."""
    task, triggers = unique(queue.app, "k", when_busy=buffer_one(300)), triggers_of(f"{keys.prefix}k")

    def trusted_for(seconds: float) -> tuple[str, float]:
        ((until, microseconds),) = keys.redis.zscan_iter(triggers, match="until:*")
        assert before + seconds - 0.01 < microseconds / 1e6 < time.time() + seconds + 0.01
        return until, microseconds

    before = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: before + 600)
        first = task.apply_async(**given)
    until, microseconds = trusted_for(seconds)
    keys.redis.zadd(triggers, {until: microseconds + 700e6})
    assert task.delay() == first
    keys.redis.zadd(triggers, {until: microseconds - 700e6})
    message = queue.take()
    with keys.busy():
        queue.deliver(message)
    trusted_for(requeued)
    assert task.delay() == first, "a worker has requeued it"
    keys.redis.zadd(triggers, {until: microseconds - 700e6})
    assert task.delay() != first
    assert len(queue) == 2


def test_a_task_that_may_be_lost_is_replaced_ever_more_seldom(queue: Queue, keys: Keys) -> None:
    """Each is waited for as long as all before: with a rate limit they wait behind one another."""
    task, triggers = unique(queue.app, "k", when_busy=buffer_one()), triggers_of(f"{keys.prefix}k")
    task.delay()
    number = keys.redis.zscore(triggers, "pending") - 1000e6  # it was queued so long ago
    for member, score in keys.redis.zscan_iter(triggers):
        keys.redis.zadd(triggers, {member: number if score < time.time() * 1e6 else 1})
    second = task.delay()
    assert len(queue) == 2
    assert task.delay() == second
    ((_, microseconds),) = keys.redis.zscan_iter(triggers, match="until:*")
    assert 1000 - SLACK < microseconds / 1e6 - time.time() < 1000 + SLACK


def test_a_duplicate_of_the_newest_task_is_a_busy_event(queue: Queue, keys: Keys) -> None:
    """But one that cannot be compared equals no other."""
    task = unique(queue.app, "k", when_busy=buffer_one())
    with events() as seen:
        task.delay(1)
        for _ in range(2):
            task.apply_async((object(),), serializer="pickle")
        task.delay(1)
        assert seen == []
        task.delay(1)
    assert seen == [Busy(f"{keys.prefix}k", task.name, b"")]
    reason = "is taken by a value that is not known, or an equal task waits for it"
    assert str(seen[0]) == f"{task.name} did not run: {keys.prefix}k {reason}"
    unique(queue.app, "k", function=done, when_busy=buffer_one()).delay()  # another task is no duplicate
    assert len(queue) == 5


# A server that goes away


@pytest.mark.parametrize("options", [{"when_down": fail}, {"when_down": carry_on}, {"when_busy": buffer_one()}])
def test_a_task_that_could_not_ask_for_its_key_frees_it(queue: Queue, keys: Keys, way: Proxy, options: Any) -> None:
    """So it keeps no other from its queue."""
    is_unique = "when_busy" not in options
    task = unique(queue.app, "k", lease=1, **options)
    queue.app.finalize()
    first = task.delay()
    assert task.delay() == first
    with way.refused():
        result = queue.deliver()
        assert ("LockUnavailable" in str(result)) == (options.get("when_down") is not carry_on)
        assert ("k" in keys) == is_unique
    assert eventually(lambda: "k" not in keys)
    assert eventually(lambda: not renewal._renewer.pending_releases)  # it is not looked for again
    assert task.delay() != first


@pytest.mark.parametrize(
    ("how", "options", "levels"),
    [
        ("the server refuses", {}, ["WARNING"]),  # and nobody may ever come to know
        ("the server is away", {}, ["DEBUG"]),
        ("the server is away, and the task ends", {}, ["DEBUG"]),
        ("the server is away", {"when_busy": buffer_one()}, []),
    ],
)
def test_a_task_is_published_though_its_key_is_not_lengthened(
    queue: Queue, keys: Keys, way: Proxy, caplog: pytest.LogCaptureFixture, how: str, options: Any, levels: list[str]
) -> None:
    def trouble() -> None:
        if "away" in how:
            stack.enter_context(way.refused())
        else:
            del keys["k"]
            keys.redis.rpush(f"{keys.prefix}k", "no string")

    task = unique(queue.app, "k", **options)
    caplog.set_level("DEBUG", "only_one")
    with ExitStack() as stack, about_to_publish(task, trouble):
        answer = task.delay(1)
        assert isinstance(answer, AsyncResult)
        if how.endswith("ends"):
            keys.withdraw(answer.id)
    assert len(queue) == 1
    text = f"{keys.prefix}k is queued, and may be queued again in 30 s: "
    assert [each.levelname for each in caplog.records if each.getMessage().startswith(text)] == levels
    assert f"{text}None" not in caplog.messages  # it ends with the error
    if "refuses" in how:
        keys["k"] = queue.messages()[-1]["headers"]["only_one"]["token"].encode()
    if levels:  # and as soon as the server is back, or refuses no more
        assert eventually(lambda: "k" not in keys if how.endswith("ends") else keys.left() > 1000)
        assert eventually(lambda: not renewal._renewer.pending_releases)  # it is not looked for any more
