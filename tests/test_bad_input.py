"""Wrong uses, a row each: the class of the error, and the words that say what to write instead."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest
import redis.asyncio
import valkey.asyncio
from celery import Celery, Task, shared_task
from kombu.transport.redis import PrefixedStrictRedis
from redis import ConnectionPool, Redis

import only_one as package
from only_one import (
    ConfigurationError,
    KeyTemplateError,
    UnkeyableArgument,
    buffer_one,
    carry_on,
    configure,
    current_lock,
    retry,
    subscribe,
)

only_one: Any = package.only_one  # type checkers would refuse much of this
configure_: Any = configure
subscribe_: Any = subscribe
KombusClient: Any = PrefixedStrictRedis
Row = tuple[str, Callable[[], object], type[Exception], str]

AT_LEAST = "write at least 0.001 seconds"
AT_MOST = "ten years"
SECONDS = "write seconds, such as"
SHORTER = "shorter lease, or leave one of them out"
POLICY = "skip, fail, or any callable"
URL = "write redis://"
SOURCE = "redis://host:6379/0, a client, or a callable that returns one"


# --- what is covered, or is not ----------------------------------------------------------------------------------


def function(a: Any = None, b: Any = 2, *rest: Any, c: Any = 3, **others: Any) -> None:
    """Can be covered."""


def two(x: Any, y: Any) -> None:
    """Can be covered."""


def with_self(self: Any, x: Any, y: Any) -> None:
    """Can be covered."""


def named(name: Any, md5: Any) -> None:
    """Has parameters with names of ours."""


def generator() -> Iterator[int]:
    """Cannot be covered."""
    yield 1


async def async_generator() -> AsyncIterator[int]:
    """Cannot be covered."""
    yield 1


async def coroutine(*_: Any) -> str:
    """Can be covered, but is no policy, key, hook or source of clients."""
    return "x"


class Awaited:
    """Has an instance that is no policy, key, hook or source of clients: its call is a coroutine."""

    async def __call__(self, *_: Any) -> str:
        return "x"


ASYNC = {
    "async": coroutine,
    "an async partial": functools.partial(coroutine, 1),
    "an object with an async call": Awaited(),
    "a partial of one": functools.partial(Awaited(), 1),
}


class Feed:
    """Has methods of every kind."""

    def load(self) -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    @property
    def size(self) -> int:
        return 1

    def __call__(self) -> None: ...


class QueueTask:
    """What a task queue makes of a function, in the shape of dramatiq's actors and huey's tasks."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)


class WrappingTask(QueueTask):
    """The same in the shape of taskiq's tasks, which have the name of their function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        super().__init__(function)


class ScheduledJob:
    """The shape of APScheduler's jobs; the decorator that makes one returns the function as it was."""

    __slots__ = ("func",)
    __module__ = "apscheduler.job"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.func = function


class Nameless(Task):  # type: ignore[misc]
    """A class-based task that Celery is to name."""

    def run(self) -> None: ...


class AsTask(Task):  # type: ignore[misc]
    """A class-based task."""

    name = "as-task"

    def run(self) -> None: ...


def app() -> Celery:
    """An application that is nobody's current one."""
    return Celery("bad", broker="memory://", set_as_current=False)


def cover(key: object, *args: object, over: Callable[..., Any] = function, **options: object) -> Any:
    """Cover a function by this key and call it."""
    covered = only_one(key=key, **options)(over)
    result = covered(*args)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


def busy(policy: object, over: Callable[..., Any] | None = None) -> Any:
    """Ask for a policy, by a call from inside its own run."""
    covered: Any = only_one("k", when_busy=policy)(over or (lambda deeper: covered(deeper - 1) if deeper else None))
    return covered(1)


def in_environment(variable: str, value: str) -> Callable[[], object]:
    """A call in an environment that says something wrong."""

    def call() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(variable, value)
            return only_one("k")(function)()

    return call


def scheduled() -> object:
    """Decorate a function that a scheduler has."""
    job = ScheduledJob(lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "apscheduler", ModuleType("apscheduler"))
        return only_one("k")(job.func)


# --- times -------------------------------------------------------------------------------------------------------

TIMES: list[tuple[str, object, str]] = [
    ("zero", 0, AT_LEAST),
    ("negative", -1.5, AT_LEAST),
    ("NaN", math.nan, AT_LEAST),
    ("below a millisecond", 0.0009, AT_LEAST),
    ("infinite", math.inf, AT_MOST),
    ("too huge for a float", 10**5000, AT_MOST),
    ("timedelta below a millisecond", timedelta(microseconds=5), AT_LEAST),
    ("longest timedelta", timedelta.max, AT_MOST),
    ("longer than ten years", timedelta(days=10 * 365, milliseconds=1), AT_MOST),
    ("True", True, SECONDS),
    ("Decimal", Decimal(3), SECONDS),
]
ROWS: list[Row] = [
    (f"lease: {label}", functools.partial(only_one, "k", lease=value), ConfigurationError, words)
    for label, value, words in TIMES
]
ROWS += [
    ("timeout: zero", lambda: only_one("k", 0), ConfigurationError, AT_LEAST),
    ("configure timeout: zero", lambda: configure_(timeout=0), ConfigurationError, AT_LEAST),
    ("configure lease: zero", lambda: configure_(lease=0), ConfigurationError, AT_LEAST),
    ("configure queue_timeout", lambda: configure_(queue_timeout=0), ConfigurationError, "queue_timeout=0: write"),
    ("timeout: a str", lambda: only_one("k", timeout="5m"), ConfigurationError, "timeout=300, or a timedelta, such as"),
    ("timeout: a key", lambda: only_one(timeout="nightly"), ConfigurationError, "only_one('nightly', 300)"),
    ("lease: a str", lambda: only_one("k", lease="300"), ConfigurationError, "lease=300, or a timedelta, such as"),
    ("key and timeout swapped", lambda: only_one(300, "k"), ConfigurationError, "only_one("),
    ("timeout where the key of a function belongs", lambda: only_one(function, "k"), ConfigurationError, "key"),
    (
        "lease longer than timeout",
        lambda: only_one("k", 10, lease=timedelta(minutes=1)),
        ConfigurationError,
        SHORTER,
    ),
    ("configure: lease > timeout", lambda: configure_(timeout=10, lease=20), ConfigurationError, SHORTER),
]

# --- key templates -----------------------------------------------------------------------------------------------

PARAMETERS = "write one of {name}, {md5}, {a}, {b}, {rest}, {c}, {others["
TEMPLATES: list[tuple[str, str]] = [
    ("", "write a name for the lock"),
    ("{a", "a literal brace is written {{ or }}"),
    ("{a!rr}", "a literal brace is written {{ or }}"),
    ("{}", f"{PARAMETERS}name]}}"),
    ("{nope}", f"{PARAMETERS}nope]}}"),
    ("{a..b}", PARAMETERS),
    ("{a[x]y}", PARAMETERS),
    ("{a!x}", "write !r, !s or !a"),
    ("{a:{b}}", "write the format out"),
    ("{a}{b}", "write {a}:{b}"),
    ("{name}{a}", "write {name}:{a}"),
    ("{a:md5}{b!r}", "write {a:md5}:{b!r}"),
    ("{a}%:{b}", "write {a}:{b}"),
    ("{a}{{{b}", "write {a}:{b}"),
    ("{a}}}:{b}", "write {a}:{b}"),
    ("{a.__class__}", "key=callable"),
    ("{a[_x]}", "key=callable"),
    ("{_a}", "key=callable"),
    ("{name:md5}", "write {name}"),
    ("{md5!r}", "write {md5}"),
    ("{name.x}", "key=callable"),
]
ROWS += [
    (f"template {template!r}", lambda template=template: only_one(template)(function), KeyTemplateError, words)  # type: ignore[misc]
    for template, words in TEMPLATES
]
ROWS += [
    ("a field of a parameter called md5", lambda: only_one("{md5[x]}")(named), KeyTemplateError, "key=callable"),
    ("two keys", lambda: only_one("k", key="l"), ConfigurationError, "write one of them"),
    ("{name} of a lambda", lambda: only_one(lambda: 1), KeyTemplateError, "key=lambda"),
    ("a lambda as the key without key=", lambda: only_one(lambda _: "k")(two), KeyTemplateError, "key=lambda"),
    ("key=None", lambda: only_one(key=None)(function), KeyTemplateError, "write a template such as"),
    ("a key that takes nothing", lambda: only_one(key=lambda: "k")(two), KeyTemplateError, "all parameters"),
    ("a key that takes too many", lambda: only_one(key=lambda x, y, z: "k")(two), KeyTemplateError, "all parameters"),  # noqa: ARG005
    ("a key by position only", lambda: only_one(key=lambda x, y, /: "k")(two), KeyTemplateError, "all parameters"),  # noqa: ARG005
    (
        "a key for neither a function nor a bound task",
        lambda: only_one(key=lambda x: "k")(with_self),  # noqa: ARG005
        KeyTemplateError,
        "all parameters",
    ),
    (
        "a key that takes too few of a task's",
        lambda: only_one(key=lambda y: "k")(app().task(lazy=False, name="few")(two)),  # noqa: ARG005
        KeyTemplateError,
        "all parameters",
    ),
    *(
        (f"a key: {label}", lambda key=key: only_one(key=key)(two), KeyTemplateError, "write a plain one")
        for label, key in ASYNC.items()
    ),
    ("key_=", lambda: only_one(key_="k"), TypeError, "key_"),
]

# --- arguments; test_keys has more of them -----------------------------------------------------------------------

ROWS += [
    ("a list in a plain field", lambda: cover("{a}", [1]), UnkeyableArgument, "{a:md5}"),
    ("an object in the digest of all", lambda: cover("{md5}", 1, object()), UnkeyableArgument, "'b'"),
    ("an object among the rest", lambda: cover("{md5}", 1, 2, object()), UnkeyableArgument, "'rest'"),
    ("a missing attribute", lambda: cover("{a.id}", None), UnkeyableArgument, "key=callable"),
    ("a format of another type", lambda: cover("{a:%Y}", "x"), UnkeyableArgument, "format, or key=callable"),
    ("a key that is bytes", lambda: cover(lambda *_, **__: b"k"), UnkeyableArgument, "<lambda> returned b'k': ret"),
    ("a key that is empty", lambda: cover(lambda *_, **__: ""), UnkeyableArgument, "return a str"),
]

# --- methods, whose object is an argument ------------------------------------------------------------------------


def in_class_body(*, of_class: bool = False, **options: Any) -> Callable[[], object]:
    """A method of a plain class, covered where it is defined."""

    def define() -> object:
        class Plain:
            if of_class:

                @classmethod
                @only_one(**options)  # type: ignore[untyped-decorator]
                def load(cls, day: int) -> None: ...

            else:

                @only_one(**options)  # type: ignore[untyped-decorator]
                async def load(self, day: int) -> None: ...

        return Plain

    return define


ROWS += [
    ("a method", in_class_body(), KeyTemplateError, "@only_one('load:{self.id}')"),
    ("a method by {md5}", in_class_body(key="{md5}"), KeyTemplateError, "@only_one('load:{self.id}')"),
    ("a method of a class", in_class_body(of_class=True), KeyTemplateError, "@only_one('load')"),
]

# --- functions and the order of decorators -----------------------------------------------------------------------

CONSUMER = "function that consumes it"
NO_FUNCTION = "write @only_one directly above the def, below every other decorator except Celery's task"
ROWS += [
    (label, functools.partial(only_one("k"), over), ConfigurationError, words)
    for label, over, words in [
        ("a generator function", generator, CONSUMER),
        ("an async generator function", async_generator, CONSUMER),
        ("a class", Feed, "above the method that does the work"),
        ("a class-based task", AsTask, "above the method that does the work"),
        ("an object that can be called", Feed(), "above the __call__ of its class"),
        ("a partial", functools.partial(two, 1), NO_FUNCTION),
        ("a method for each type", functools.update_wrapper(functools.singledispatchmethod(two), two), NO_FUNCTION),  # type: ignore[arg-type]
        ("a task of another queue", QueueTask(two), NO_FUNCTION),
        ("a task of another queue with the name of its function", WrappingTask(two), NO_FUNCTION),
        ("a classmethod", vars(Feed)["of_class"], "below @classmethod, directly above the function"),
        ("a staticmethod", vars(Feed)["static"], "below @staticmethod, directly above the function"),
        ("a property", vars(Feed)["size"], "below @property, directly above the function"),
        ("None", None, NO_FUNCTION),
        ("a generator", generator(), NO_FUNCTION),
        ("a function of C that does not say its parameters", max, "write @only_one above a def around it"),
        ("a task that is not registered", Nameless(), "only_one(app.register_task("),
        ("a task of a generator", app().task(generator), CONSUMER),
        ("a task of a generator, made", app().task(lazy=False, name="bad.made")(generator), CONSUMER),
        ("a shared task of a generator", shared_task(name="bad.shared")(generator), CONSUMER),
        ("a task's signature", app().task(lazy=False, name="signed")(two).s(), NO_FUNCTION),
    ]
]
ROWS += [
    ("a str is covered", lambda: only_one("k")("l"), ConfigurationError, NO_FUNCTION),
    ("twice by one key", lambda: only_one("k")(only_one("k")(two)), ConfigurationError, "one"),
    ("a def that gives a coroutine", lambda: cover("k", over=lambda: coroutine()), ConfigurationError, "async def"),  # noqa: PLW0108
    ("a def that gives a generator", lambda: cover("k", over=lambda: generator()), ConfigurationError, "consumes"),  # noqa: PLW0108
    (
        "a def that gives an async generator",
        lambda: cover("k", over=lambda: async_generator()),  # noqa: PLW0108
        ConfigurationError,
        "consumes",
    ),
    *[
        row
        for kind, made in [
            ("a lazy task", lambda: app().task(two)),
            ("a bound task", lambda: app().task(bind=True)(with_self)),
            ("a task", lambda: app().task(lazy=False, name="made")(two)),
            ("a shared task", lambda: shared_task(name="bad.shared.two")(two)),
            ("a bound shared task", lambda: shared_task(name="bad.shared.bound", bind=True)(with_self)),
        ]
        for row in [
            (f"{kind}: no such parameter", lambda made=made: only_one("{z}")(made()), KeyTemplateError, "write one of"),
            (
                f"{kind}: retry()",
                lambda made=made: only_one("k", when_busy=retry())(made()),
                ConfigurationError,
                "write @only_one below @app.task",
            ),
        ]
    ],
    (
        "a task twice",
        lambda: only_one("k")(only_one("l")(app().task(lazy=False, name="made twice")(two))),
        ConfigurationError,
        "write one @only_one above @app.task",
    ),
    (
        "a task and its function by one key",
        lambda: only_one("k")(app().task(lazy=False, name="made of covered")(only_one("k")(two))),
        ConfigurationError,
        "write one @only_one",
    ),
    ("a function that is scheduled", scheduled, ConfigurationError, "below @scheduler.scheduled_job"),
    ("current_lock outside of a run", current_lock, ConfigurationError, "@only_one above it"),
]


# --- policies ----------------------------------------------------------------------------------------------------

for label, policy in [
    ("None", None),
    ("a dotted name", "only_one.skip"),
    ("takes nothing", lambda: None),
    ("takes two", lambda error, more: None),  # noqa: ARG005
    *ASYNC.items(),
]:
    ROWS.append((f"when_busy: {label}", functools.partial(only_one, "k", when_busy=policy), ConfigurationError, POLICY))
ROWS += [
    ("when_down: None", lambda: only_one("k", when_down=None), ConfigurationError, "when_down=None: write skip"),
    ("when_lost: None", lambda: only_one("k", when_lost=None), ConfigurationError, "when_lost=None: write skip"),
    ("when_lost=skip", lambda: only_one("k", when_lost=package.skip), ConfigurationError, "when_lost=carry_on"),
    ("configure when_busy: a name", lambda: configure_(when_busy="skip"), ConfigurationError, POLICY),
]
ROWS += [
    ("when_busy=carry_on", lambda: only_one("k", when_busy=carry_on), ConfigurationError, "when_busy=skip"),
    ("retry without parentheses", lambda: only_one("k", when_busy=retry), ConfigurationError, "retry()"),
    ("buffer_one without parentheses", lambda: only_one("k", when_busy=buffer_one), ConfigurationError, "buffer_one()"),
    ("configure retry", lambda: configure_(when_busy=retry), ConfigurationError, "retry()"),
    ("when_down=buffer_one()", lambda: only_one("k", when_down=buffer_one()), ConfigurationError, "retry()"),
    ("when_lost=retry()", lambda: only_one("k", when_lost=retry()), ConfigurationError, "when_lost=fail"),
    ("when_lost=buffer_one()", lambda: only_one("k", when_lost=buffer_one()), ConfigurationError, "when_lost=fail"),
    ("retry that is given the error", lambda: busy(lambda error: retry(error)), ConfigurationError, "retry()"),  # noqa: PLW0108
    ("a countdown of nothing", lambda: retry(0), ConfigurationError, "countdown=0: write"),
    ("a countdown of a str", lambda: buffer_one("5"), ConfigurationError, "countdown=300"),  # type: ignore[arg-type]
    (
        "buffer_one that is given the error",
        lambda: busy(lambda error: buffer_one(error)),  # noqa: PLW0108
        ConfigurationError,
        "write buffer_one()",
    ),
    ("max_retries below nothing", lambda: retry(max_retries=-1), ConfigurationError, "such as 10"),
    ("max_retries of a half", lambda: retry(max_retries=0.5), ConfigurationError, "such as 10"),  # type: ignore[arg-type]
    ("max_retries of True", lambda: retry(max_retries=True), ConfigurationError, "such as 10"),
    ("configure when_busy=carry_on", lambda: configure_(when_busy=carry_on), ConfigurationError, "when_busy=skip"),
    ("carry_on by way of a lambda", lambda: busy(lambda error: carry_on(error)), ConfigurationError, "when_busy"),  # noqa: PLW0108
]

# --- servers -----------------------------------------------------------------------------------------------------

URLS = ["", "localhost:6379", "http://localhost", "redis://localhost:port", "redis://localhost/feeds", "unix://"]
# Whose text is in order, and what it says is not.
URLS += ["redis://localhost:99999", "redis://localhost?db=x", "redis://localhost/0?nope=1"]


def not_masked() -> None:
    """A URL with a password in it, in a message."""
    with pytest.raises(ConfigurationError) as raised:
        only_one("k", redis="redis://:hunter2@host:port/0")(function)
    assert "hunter2" not in str(raised.value)
    raise raised.value


ROWS += [
    (f"redis={url!r}", lambda url=url: only_one("k", redis=url)(function)(), ConfigurationError, URL)  # type: ignore[misc]
    for url in URLS
]
ROWS += [
    ("a password in a URL", not_masked, ConfigurationError, "write redis://"),
    ("configure redis='localhost'", lambda: configure_(redis="localhost"), ConfigurationError, URL),
    ("configure redis=None", lambda: configure_(redis=None), ConfigurationError, SOURCE),
]
for label, source in [
    ("a port", 6379),
    ("a pool", ConnectionPool()),
    ("a lock", Redis().lock("k")),
    ("a pipeline", Redis().pipeline()),
    ("a pubsub", Redis().pubsub()),  # type: ignore[no-untyped-call]
]:
    ROWS.append((f"redis: {label}", functools.partial(only_one, "k", redis=source), ConfigurationError, SOURCE))
ROWS += [
    (
        "redis: an asyncio client",
        lambda: only_one("k", redis=redis.asyncio.Redis()),
        ConfigurationError,
        "give a sync one or a URL",
    ),
    (
        "redis: the class of asyncio clients",
        lambda: only_one("k", redis=redis.asyncio.Redis),
        ConfigurationError,
        "give a sync one or a URL",
    ),
    *(
        (f"redis: {label}", functools.partial(only_one, "k", redis=source), ConfigurationError, words)
        for label, source, words in [
            ("a client of valkey-py", valkey.Valkey(), "client of valkey-py"),
            ("an asyncio client of valkey-py", valkey.asyncio.Valkey(), "write the server's URL, redis://"),
            ("a client with a prefix", KombusClient(global_keyprefix="a:"), "write a URL, and prefix='a:only_one:'"),
        ]
    ),
    *(
        (f"redis: a callable that {label}", lambda source=source: cover("k", redis=source), ConfigurationError, words)
        for label, source, words in [
            ("gives None", lambda: None, "return a client of redis-py"),
            ("gives a client of valkey-py", lambda: valkey.Valkey(), "write the server's URL"),  # noqa: PLW0108
            ("gives a bad URL", lambda: "localhost", URL),
            ("gives an asyncio client", lambda: redis.asyncio.Redis(), "give a sync one or a URL"),  # noqa: PLW0108
            *((f"is {label}", source, SOURCE) for label, source in ASYNC.items()),
            ("takes arguments", lambda url: url, SOURCE),
        ]
    ),
]

# --- settings, environment, hooks --------------------------------------------------------------------------------

ROWS += [
    *(
        (f"prefix={prefix!r}", functools.partial(configure_, prefix=prefix), ConfigurationError, "str without braces")
        for prefix in (None, b"x", "a{", "a}b")
    ),
    ("takeover=0", lambda: only_one("k", takeover=0), ConfigurationError, "takeover=True or"),
    ("configure takeover=None", lambda: configure_(takeover=None), ConfigurationError, "takeover=True or"),
    *(
        (f"active={active!r}", functools.partial(configure_, active=active), ConfigurationError, "active=True or")
        for active in (None, 0)
    ),
    ("a setting that there is not", lambda: configure_(url="redis://localhost"), TypeError, "url"),
    ("ONLY_ONE_ACTIVE=2", in_environment("ONLY_ONE_ACTIVE", "2"), ConfigurationError, "ONLY_ONE_ACTIVE=0 or"),
    ("ONLY_ONE_REDIS_URL=localhost", in_environment("ONLY_ONE_REDIS_URL", "localhost"), ConfigurationError, URL),
    *(
        (f"hook: {label}", lambda hook=hook: subscribe_(hook)(), ConfigurationError, words)
        for label, hook, words in [
            ("a name", "print", "hook='print' is"),
            *((label, hook, "subscribe(function)") for label, hook in ASYNC.items()),
        ]
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_a_wrong_use_is_refused_with_what_to_write_instead(
    request: pytest.FixtureRequest,
    redis_url: str,
    call: Callable[[], object],
    error: type[Exception],
    words: str,
) -> None:
    with configure(redis=redis_url) if "ONLY_ONE_REDIS_URL" not in request.node.callspec.id else configure():
        with pytest.raises(error) as raised:
            call()
        assert type(raised.value) is error
        assert words in str(raised.value)


def test_there_is_a_row_for_each_wrong_use() -> None:
    assert len({row[0] for row in ROWS}) == len(ROWS)


def test_what_has_yet_to_run_is_closed_when_it_is_refused(redis_url: str) -> None:
    """Python would warn of a coroutine that nobody has awaited."""
    begun, words = coroutine(), r"<lambda> returned a coroutine.*async def"
    with configure(redis=redis_url), pytest.raises(ConfigurationError, match=words):
        cover("k", over=lambda: begun)
    assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED
