"""Wrong uses, a row each: the class of the error, and the words that say what to write instead."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
import redis.asyncio
from celery import Celery, Task, shared_task
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

    @functools.cached_property
    def weight(self) -> int:
        return 1

    def __call__(self) -> None: ...


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


# --- times -------------------------------------------------------------------------------------------------------

TIMES: list[tuple[str, object, str]] = [
    ("zero", 0, AT_LEAST),
    ("zero as float", 0.0, AT_LEAST),
    ("negative", -1, AT_LEAST),
    ("NaN", math.nan, AT_LEAST),
    ("below a millisecond", 0.0001, AT_LEAST),
    ("infinite", math.inf, AT_MOST),
    ("minus infinite", -math.inf, AT_LEAST),
    ("huge", 10**30, AT_MOST),
    ("too huge for a float", 10**400, AT_MOST),
    ("zero timedelta", timedelta(0), AT_LEAST),
    ("negative timedelta", timedelta(days=-1), AT_LEAST),
    ("timedelta below a millisecond", timedelta(microseconds=5), AT_LEAST),
    ("longest timedelta", timedelta.max, AT_MOST),
    ("True", True, SECONDS),
    ("False", False, SECONDS),
    ("Decimal", Decimal(3), SECONDS),
    ("complex", 1j, SECONDS),
    ("list", [300], SECONDS),
    ("bytes", b"300", SECONDS),
    ("datetime", datetime(2030, 1, 1, tzinfo=timezone.utc), SECONDS),
    ("callable", lambda: 300, SECONDS),
]
ROWS: list[Row] = []
for label, value, words in TIMES:
    for option in ("timeout", "lease"):
        options = {option: value}
        ROWS += [
            (f"{option}: {label}", functools.partial(only_one, "k", **options), ConfigurationError, words),
            (f"configure {option}: {label}", functools.partial(configure_, **options), ConfigurationError, words),
        ]
ROWS += [
    ("timeout: a str", lambda: only_one("k", timeout="300"), ConfigurationError, ", 300)"),
    ("lease: a str", lambda: only_one("k", lease="300"), ConfigurationError, SECONDS),
    ("configure timeout: a str", lambda: configure_(timeout="300"), ConfigurationError, SECONDS),
    ("key and timeout swapped", lambda: only_one(300, "k"), ConfigurationError, "only_one("),
    ("timeout where the key of a function belongs", lambda: only_one(function, "k"), ConfigurationError, "key"),
    ("lease longer than timeout", lambda: only_one("k", timeout=10, lease=20), ConfigurationError, SHORTER),
    (
        "lease longer than timeout, as timedelta",
        lambda: only_one("k", 10, lease=timedelta(minutes=1)),
        ConfigurationError,
        SHORTER,
    ),
    ("configure: lease > timeout", lambda: configure_(timeout=10, lease=20), ConfigurationError, SHORTER),
]

# --- key templates -----------------------------------------------------------------------------------------------

PARAMETERS = "write one of {name}, {md5}, {a}, {b}"
TEMPLATES: list[tuple[str, str]] = [
    ("", "write a name for the lock"),
    ("{", "a literal brace is written {{ or }}"),
    ("}", "a literal brace is written {{ or }}"),
    ("{a", "a literal brace is written {{ or }}"),
    ("a}", "a literal brace is written {{ or }}"),
    ("{a[}", "a literal brace is written {{ or }}"),
    ("{a!}", "a literal brace is written {{ or }}"),
    ("{a!rr}", "a literal brace is written {{ or }}"),
    ("{}", PARAMETERS),
    ("{0}", PARAMETERS),
    ("{nope}", PARAMETERS),
    ("{A}", PARAMETERS),
    ("{self}", PARAMETERS),
    ("{ a }", PARAMETERS),
    ("{a b}", PARAMETERS),
    ("{a()}", PARAMETERS),
    ("{a+1}", PARAMETERS),
    ("{kwargs[x]}", PARAMETERS),
    ("{a..b}", PARAMETERS),
    ("{a.}", PARAMETERS),
    ("{a[]}", PARAMETERS),
    ("{a[x]y}", PARAMETERS),
    ("{name}-lock-{feed_url:md5}", PARAMETERS),
    ("{a!x}", "write !r, !s or !a"),
    ("{a:{b}}", "write the format out"),
    ("{a}{b}", "write {a}:{b}"),
    ("{name}{a}", "write {name}:{a}"),
    ("{md5}{a}", "write {md5}:{a}"),
    ("{a:md5}{b:md5}", "write {a:md5}:{b:md5}"),
    ("{a}%{b}", "write {a}:{b}"),
    ("{a}{{{b}", "write {a}:{b}"),
    ("{a._x}", "key=callable"),
    ("{a.__class__}", "key=callable"),
    ("{a[_x]}", "key=callable"),
    ("{_a}", "key=callable"),
    ("{name:md5}", "write {name}"),
    ("{name!r}", "write {name}"),
    ("{md5:md5}", "write {md5}"),
    ("{name.x}", "key=callable"),
    ("{md5.x}", "key=callable"),
]
ROWS += [
    (f"template {template!r}", lambda template=template: only_one(template)(function), KeyTemplateError, words)  # type: ignore[misc]
    for template, words in TEMPLATES
]
ROWS += [
    ("a field of a parameter called name", lambda: only_one("{name[x]}")(named), KeyTemplateError, "key=callable"),
    ("a field of a parameter called md5", lambda: only_one("{md5:>3}")(named), KeyTemplateError, "write {md5}"),
    ("two keys", lambda: only_one("k", key="l"), ConfigurationError, "write one of them"),
    ("{name} of a lambda", lambda: only_one(lambda: 1), KeyTemplateError, "key=lambda"),
    ("a lambda as the key without key=", lambda: only_one(lambda _: "k")(two), KeyTemplateError, "key=lambda"),
    *(
        (f"key={key!r:.9}", lambda key=key: only_one(key=key)(function), KeyTemplateError, "write a template such as")
        for key in (None, 1, 1.5, b"k", ["k"], ("k",))
    ),
    ("a key that takes nothing", lambda: only_one(key=lambda: "k")(two), KeyTemplateError, "all parameters"),
    ("a key that takes too few", lambda: only_one(key=lambda x: "k")(two), KeyTemplateError, "all parameters"),  # noqa: ARG005
    ("a key that takes too many", lambda: only_one(key=lambda x, y, z: "k")(two), KeyTemplateError, "all parameters"),  # noqa: ARG005
    ("an async key", lambda: only_one(key=coroutine)(two), KeyTemplateError, "write a plain one"),
    ("key_=", lambda: only_one(key_="k"), TypeError, "key_"),
]

# --- arguments ---------------------------------------------------------------------------------------------------

ROWS += [
    ("a list in a plain field", lambda: cover("{a}", [1]), UnkeyableArgument, "{a:md5}"),
    ("a tuple in a plain field", lambda: cover("{a}", (1,)), UnkeyableArgument, "{a:md5}"),
    ("a dict in a plain field", lambda: cover("{a!r}", {}), UnkeyableArgument, "{a:md5}"),
    ("a set in a plain field", lambda: cover("{a!s}", {1}), UnkeyableArgument, "{a:md5}"),
    ("an object in a plain field", lambda: cover("{a}", object()), UnkeyableArgument, "{a.id}"),
    ("an object in a digest", lambda: cover("{a:md5}", object()), UnkeyableArgument, "{a.id}"),
    ("an object in the digest of all", lambda: cover("{md5}", 1, object()), UnkeyableArgument, "{b.id}"),
    ("an object deep inside", lambda: cover("{a:md5}", {"x": [object()]}), UnkeyableArgument, "key=callable"),
    ("an object among the rest", lambda: cover("{md5}", 1, 2, object()), UnkeyableArgument, "'rest'"),
    ("a function as argument", lambda: cover("{a}", two), UnkeyableArgument, "key=callable"),
    ("an iterator as argument", lambda: cover("{a:md5}", iter([])), UnkeyableArgument, "key=callable"),
    ("a missing attribute", lambda: cover("{a.id}", None), UnkeyableArgument, "key=callable"),
    ("a missing item", lambda: cover("{a[sku]}", {}), UnkeyableArgument, "key=callable"),
    ("an item of what has none", lambda: cover("{a[0]}", 1), UnkeyableArgument, "key=callable"),
    ("a format of another type", lambda: cover("{a:%Y}", "x"), UnkeyableArgument, "format, or key=callable"),
    ("md5 in capitals", lambda: cover("{a:MD5}", "x"), UnkeyableArgument, "format, or key=callable"),
    ("a bound method's self", lambda: cover("{md5}", Feed()), UnkeyableArgument, "{a.id}"),
    ("a key that is None", lambda: cover(lambda *_, **__: None), UnkeyableArgument, "return a str"),
    ("a key that is a number", lambda: cover(lambda *_, **__: 1), UnkeyableArgument, "return a str"),
    ("a key that is bytes", lambda: cover(lambda *_, **__: b"k"), UnkeyableArgument, "return a str"),
    ("a key that is empty", lambda: cover(lambda *_, **__: ""), UnkeyableArgument, "return a str"),
]

# --- functions and the order of decorators -----------------------------------------------------------------------

CONSUMER = "function that consumes it"
NO_FUNCTION = "write @only_one above a"
ROWS += [
    (f"{label}, {form}", functools.partial(call, over), ConfigurationError, words)
    for label, over, words in [
        ("a generator function", generator, CONSUMER),
        ("an async generator function", async_generator, CONSUMER),
        ("a class", Feed, "above the method that does the work"),
        ("a class-based task", AsTask, "above the method that does the work"),
        ("an object that can be called", Feed(), "above the __call__ of its class"),
        ("a partial", functools.partial(two, 1), NO_FUNCTION),
        ("a classmethod", vars(Feed)["of_class"], "below @classmethod, directly above the function"),
        ("a staticmethod", vars(Feed)["static"], "below @staticmethod, directly above the function"),
        ("a property", vars(Feed)["size"], "below @property, directly above the function"),
        ("a cached property", vars(Feed)["weight"], NO_FUNCTION),
        ("None", None, NO_FUNCTION),
        ("a number", 3, NO_FUNCTION),
        ("a module", functools, NO_FUNCTION),
        ("a task that is not registered", Nameless(), "only_one(app.register_task("),
        ("a task of a generator", app().task(generator), CONSUMER),
        ("a shared task of a generator", shared_task(name="bad.shared")(generator), CONSUMER),
        ("a task's signature", app().task(lazy=False, name="signed")(two).s(), NO_FUNCTION),
    ]
    for form, call in [
        ('@only_one("k")', only_one("k")),
        ("@only_one", only_one),
        ("only_one(f, key=)", lambda over: only_one(over, key="k")),
    ]
    if not (over is None or over == 3) or form == '@only_one("k")'
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
            (f"{kind}: nothing between", lambda made=made: only_one("{x}{y}")(made()), KeyTemplateError, "between"),
            (
                f"{kind}: retry()",
                lambda made=made: only_one("k", when_busy=retry())(made()),
                ConfigurationError,
                "write @only_one below @app.task",
            ),
            (
                f"{kind}: carry_on",
                lambda made=made: only_one("k", when_busy=carry_on)(made()),
                ConfigurationError,
                "when_busy=skip",
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
    ("current_lock outside of a run", current_lock, ConfigurationError, "@only_one above it"),
]


# --- policies ----------------------------------------------------------------------------------------------------

for label, policy in [
    ("None", None),
    ("a number", 1),
    ("True", True),
    ("a name", "skip"),
    ("a dotted name", "only_one.skip"),
    ("a list", [package.skip]),
    ("takes nothing", lambda: None),
    ("takes two", lambda error, more: None),  # noqa: ARG005
    ("async", coroutine),
]:
    ROWS += [
        (f"when_busy: {label}", functools.partial(only_one, "k", when_busy=policy), ConfigurationError, POLICY),
        (f"when_down: {label}", functools.partial(only_one, "k", when_down=policy), ConfigurationError, POLICY),
        (f"configure when_busy: {label}", functools.partial(configure_, when_busy=policy), ConfigurationError, POLICY),
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
    ("a countdown of nothing", lambda: retry(0), ConfigurationError, "countdown"),
    ("a countdown of a str", lambda: buffer_one("5"), ConfigurationError, "countdown=300"),  # type: ignore[arg-type]
    ("a countdown of True", lambda: retry(countdown=True), ConfigurationError, "countdown"),
    ("max_retries below nothing", lambda: retry(max_retries=-1), ConfigurationError, "such as 10"),
    ("max_retries of a half", lambda: retry(max_retries=0.5), ConfigurationError, "such as 10"),  # type: ignore[arg-type]
    ("max_retries of True", lambda: retry(max_retries=True), ConfigurationError, "such as 10"),
    ("configure when_busy=carry_on", lambda: configure_(when_busy=carry_on), ConfigurationError, "when_busy=skip"),
    ("carry_on by way of a lambda", lambda: busy(lambda error: carry_on(error)), ConfigurationError, "when_busy"),  # noqa: PLW0108
]

# --- servers -----------------------------------------------------------------------------------------------------

URLS = [
    "",
    "localhost",
    "localhost:6379",
    "http://localhost",
    "redis:/localhost",
    "valkey://localhost",
    "memcached://localhost",
    "sqla+sqlite://",
    "sentinel://localhost:26379",
    "redis+socket:///tmp/x",
    "redis://localhost:99999",
    "redis://localhost:port",
    "redis://localhost/feeds",
    "redis://localhost?db=x",
    "redis://localhost/0?socket_timeout=abc",
    "redis://localhost/0?nope=1",
    "redis://localhost/0?protocol=9",
    "rediss://localhost?ssl_cert_reqs=x",
    "unix://",
    "redis://:hunter2@host:port/0",
]


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
    ("configure redis=''", lambda: configure_(redis=""), ConfigurationError, URL),
    ("configure redis='localhost'", lambda: configure_(redis="localhost"), ConfigurationError, URL),
    ("configure redis=None", lambda: configure_(redis=None), ConfigurationError, SOURCE),
]
for label, source in [
    ("a port", 6379),
    ("bytes", b"redis://localhost"),
    ("a dict", {"host": "localhost"}),
    ("a pair", ("localhost", 6379)),
    ("a module", redis),
    ("a pool", ConnectionPool()),
    ("a lock", Redis().lock("k")),
    ("a pipeline", Redis().pipeline()),
    ("a pubsub", Redis().pubsub()),  # type: ignore[no-untyped-call]
    ("an object", object()),
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
        (f"redis: a callable that {label}", lambda source=source: cover("k", redis=source), ConfigurationError, words)
        for label, source, words in [
            ("gives None", lambda: None, "return a client of redis-py"),
            ("gives a number", lambda: 6379, "return a client of redis-py"),
            ("gives a bad URL", lambda: "localhost", URL),
            ("gives an asyncio client", lambda: redis.asyncio.Redis(), "give a sync one or a URL"),  # noqa: PLW0108
            ("is async", coroutine, SOURCE),
            ("takes arguments", lambda url: url, SOURCE),
        ]
    ),
]

# --- settings, environment, hooks --------------------------------------------------------------------------------

ROWS += [
    *(
        (f"prefix={prefix!r}", functools.partial(configure_, prefix=prefix), ConfigurationError, "str without braces")
        for prefix in (None, 1, b"x", "{", "a}b", "{app}:")
    ),
    *(
        (f"active={active!r}", functools.partial(configure_, active=active), ConfigurationError, "active=True or")
        for active in (None, 0, 1, "0", "false", "no")
    ),
    ("a setting that there is not", lambda: configure_(url="redis://localhost"), TypeError, "url"),
    *(
        (
            f"ONLY_ONE_ACTIVE={value}",
            in_environment("ONLY_ONE_ACTIVE", value),
            ConfigurationError,
            "ONLY_ONE_ACTIVE=0 or",
        )
        for value in ("maybe", "2", "-1", "None")
    ),
    *(
        (f"ONLY_ONE_REDIS_URL={value}", in_environment("ONLY_ONE_REDIS_URL", value), ConfigurationError, URL)
        for value in ("localhost", "http://localhost", "redis://localhost:port")
    ),
    *(
        (f"hook: {label}", lambda hook=hook: subscribe_(hook)(), ConfigurationError, "subscribe(function)")
        for label, hook in [("None", None), ("a name", "print"), ("an object", object()), ("async", coroutine)]
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
