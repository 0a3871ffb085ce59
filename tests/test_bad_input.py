"""Wrong uses, a row each: the class of the error, and the words that say what to write instead."""

# ruff: noqa: ARG005, PLW0108 - rows of lambdas, whose parameters are what is wrong with some

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from decimal import Decimal
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import redis.asyncio
import valkey.asyncio
from celery import Celery, Task, shared_task
from kombu.transport.redis import PrefixedStrictRedis
from redis import ConnectionPool, Redis

import only_one as package
from only_one import buffer_one, carry_on, configure, current_lock, fail, retry, skip, subscribe
from only_one.errors import ConfigurationError, KeyTemplateError, UnkeyableArgument
from only_one.settings import CONFIGURABLE

only_one: Any = package.only_one  # type checkers would refuse much of this
configure_: Any = configure
subscribe_: Any = subscribe
KombusClient: Any = PrefixedStrictRedis
# Of redis-py, which needs another library for it.


class LazyText:
    """Tells of a class that it does not have, as Django's lazy objects do."""

    __class__: Any = str


def refused(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    assert words in str(raised.value)


# --- what is decorated -------------------------------------------------------------------------------------------


def function(a: Any = None, b: Any = 2, *rest: Any, c: Any = 3, **others: Any) -> None:
    """Can be decorated."""


def two(x: Any, y: Any) -> None:
    """Can be decorated."""


IN_MAIN = FunctionType(two.__code__, {"__name__": "__main__"})


def with_self(self: Any, x: Any, y: Any) -> None:
    """Can be decorated."""


def named(name: Any, md5: Any) -> None:
    """Has parameters with names of ours."""


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


async def coroutine(*_: Any) -> str:
    return "x"


class Awaitable:
    """Is no coroutine, and runs when it is awaited, as a Task or a Future."""

    closed = False

    def __await__(self) -> Iterator[None]:
        yield

    def cancel(self) -> None:
        self.closed = True


class Awaited:
    """Has an instance whose call is a coroutine."""

    async def __call__(self, *_: Any) -> str:
        return "x"


ASYNC = [coroutine, functools.partial(coroutine, 1), Awaited(), functools.partial(Awaited(), 1)]
"""None of these is a policy, a key, a hook or a source of clients."""


class QueueTask:
    """What a task queue makes of a function, as dramatiq's actors and huey's tasks."""

    def __call__(self, *args: Any) -> None: ...


class BoundTask(QueueTask):
    """The same in the shape of Prefect's tasks and flows, which bind as methods do."""

    def __get__(self, instance: object, owner: type) -> BoundTask:
        return self


class AsTask(Task):  # type: ignore[misc]
    """A class-based task that Celery is to name."""

    def run(self) -> None: ...


def app() -> Celery:
    """An application that is nobody's current one."""
    return Celery("bad", broker="memory://", set_as_current=False)


CONSUMER = "before its body has run: write @only_one above the function that consumes it"
NO_FUNCTION = "write @only_one directly above the def, below every other decorator except Celery's task"


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (generator, CONSUMER),
        (async_generator, CONSUMER),
        (AsTask, "of a class-based task, above its run"),
        (functools.partial(two, 1), NO_FUNCTION),
        (functools.update_wrapper(functools.singledispatchmethod(two), two), NO_FUNCTION),  # type: ignore[arg-type]
        (QueueTask(), NO_FUNCTION),
        (functools.update_wrapper(QueueTask(), two), NO_FUNCTION),  # taskiq's have the name of their function
        (functools.update_wrapper(BoundTask(), two), NO_FUNCTION),
        *((each, NO_FUNCTION) for each in (classmethod(two), staticmethod(two), property(function), None)),
        (300, "which is neither a function nor a key, a str"),
        (generator(), NO_FUNCTION),
        (max, "write @only_one above a def around it"),
        (AsTask(), "only_one(app.register_task(AsTask()))"),
        (app().task(generator), CONSUMER),
        (app().task(lazy=False, name="bad.made")(generator), CONSUMER),
        (shared_task(name="bad.shared")(generator), CONSUMER),
        (app().task(lazy=False, name="signed")(two).s(), NO_FUNCTION),
        (only_one("k")(two), "one"),
        (app().task(lazy=False, name="made of decorated")(only_one("k")(two)), "write one @only_one"),
        (only_one("l")(app().task(lazy=False, name="twice")(two)), "write one @only_one above @app.task"),
    ],
)
def test_what_cannot_be_decorated(target: Any, words: str) -> None:
    refused(ConfigurationError, words, lambda: only_one("k")(target))


def test_a_function_that_a_scheduler_has_cannot_be_decorated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apscheduler", ModuleType("apscheduler"))
    job = type("Job", (list,), {"__module__": "apscheduler.job"})([lambda: None])
    refused(ConfigurationError, f"without the lock: {NO_FUNCTION}", lambda: only_one("k")(job[0]))
    assert only_one("k")(two)


TASKS: dict[str, Callable[[], Any]] = {
    "a lazy task": lambda: app().task(bind=True)(with_self),
    "a task": lambda: app().task(lazy=False, name="made")(two),
    "a shared task": lambda: shared_task(name="bad.shared.bound", bind=True)(with_self),
}


@pytest.mark.parametrize("kind", TASKS)
def test_a_task_is_refused_what_it_cannot_do(kind: str) -> None:
    refused(KeyTemplateError, "write one of", lambda: only_one("{z}")(TASKS[kind]()))
    above = "when a task is queued; write @only_one below @app.task"
    refused(ConfigurationError, above, lambda: only_one("k", when_busy=retry())(TASKS[kind]()))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (coroutine, "async def"),
        (Awaitable, "async def"),
        (Future, "waits for the future"),
        (generator, "consumes"),
        (async_generator, "consumes"),
        (contextmanager(generator), "enters"),
        (asynccontextmanager(async_generator), "enters"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_what_has_yet_to_run_is_closed_when_it_is_refused(redis_url: str, made: Any, words: str, kind: str) -> None:
    """Python would warn of a coroutine that nobody has awaited."""
    begun = made()

    async def returns_it() -> Any:
        return begun

    call = only_one("k")(lambda: begun) if kind == "def" else lambda: asyncio.run(only_one("k")(returns_it)())
    with configure(redis=redis_url):
        refused(ConfigurationError, words, call)
        if made is Future:
            assert begun.cancelled()
            assert call() is begun  # of a future that has ended, nothing is yet to run
    if made is coroutine:
        assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED
    if made is Awaitable:
        assert begun.closed


# --- options -----------------------------------------------------------------------------------------------------

AT_LEAST = "write at least 0.001 seconds"
AT_MOST = "ten years"
SECONDS = "write seconds, such as"
SHORTER = "shorter lease, or a longer timeout, or timeout=None for no limit"
POLICY = "=fail, or any callable"
PARENTHESES = "(), with parentheses"
URL = "write redis://"
SOURCE = "redis://host:6379/0, a client, or a callable that returns one"
FOR_ASYNC = "redis= an asyncio client: give a sync one or a URL"
URLS = ["", "localhost:6379", "localhost", "http://localhost", "redis://localhost:port", "redis://localhost/feeds"]
# Whose text is in order, and what it says is not.
URLS += ["unix://", "redis://localhost:99999", "redis://localhost?db=x", "redis://localhost/0?nope=1"]
URLS += ["redis://localhost?maint_notifications_config=x"]

NO_POOL = SimpleNamespace(execute_command=print, register_script=print)

OPTIONS: list[tuple[dict[str, Any], str]] = [
    *(({"lease": value}, AT_LEAST) for value in (0, -1.5, math.nan, 0.0009, timedelta(microseconds=5))),
    *(({"lease": value}, AT_MOST) for value in (math.inf, 10**5000, timedelta.max)),
    ({"lease": timedelta(days=10 * 365, milliseconds=1)}, AT_MOST),
    *(({"lease": value}, SECONDS) for value in (True, Decimal(3))),
    ({"lease": "300"}, "lease=300, or a timedelta, such as"),
    ({"timeout": 0}, AT_LEAST),
    ({"timeout": "5m"}, "timeout=300, or a timedelta, such as"),
    ({"queue_timeout": 0}, "queue_timeout=0: write"),
    ({"timeout": 10, "lease": timedelta(minutes=1)}, SHORTER),
    # What is no time is refused as for `timeout`; only none at all is no mistake here, and False is not none.
    *(({"timeout": 10, "at_least": value}, "at_least=") for value in (False, None, -1, 10.5, timedelta(minutes=1))),
    *(({"when_busy": value}, POLICY) for value in (None, "only_one.skip", lambda error, more: None)),
    ({"when_busy": lambda: None}, "when_busy=<function"),
    *(({"when_busy": value}, POLICY) for value in (*ASYNC, LookupError)),
    ({"when_busy": carry_on}, "carry_on would run two at a time: write when_busy=skip"),
    *(({"when_busy": value}, value.__name__ + PARENTHESES) for value in (retry, buffer_one)),
    ({"when_down": None}, "when_down=None: write when_down=skip, when_down=fail"),
    ({"when_down": buffer_one()}, "buffer_one(countdown=None) needs"),
    ({"when_lost": None}, "when_lost=None: write when_lost=carry_on, when_lost=fail"),
    ({"when_lost": skip}, "when_lost=carry_on to let it"),
    *(({"when_lost": value}, "when_lost=fail") for value in (retry(), buffer_one())),
    *(({"takeover": value}, "takeover=True or") for value in (0, None)),
    *(({"work_id": value}, "write a callable of the call's arguments") for value in (None, "1", *ASYNC)),
    *(({"active": value}, "active=True or") for value in (0, None)),
    *(({"prefix": value}, "str of UTF-8 without braces") for value in (None, b"x", "a{", "a}b", "a\ud800")),
    *(({"redis": value}, URL) for value in URLS),
    ({"redis": "sentinel://h:26379"}, "or a client, Sentinel([...]).master_for(name)"),
    *(({"redis": f"redis://u:a{sign}b@h/0"}, "in the password %2F for /, %3F for ? and %23 for #") for sign in "/?#"),
    ({"redis": "rediss://h?ssl_cert_reqs=CERT_NONE"}, "value], with options of redis-py"),
    *(({"redis": value}, SOURCE) for value in (ConnectionPool(), Redis().lock("k"), Redis().pipeline())),
    ({"redis": 6379}, f"redis= an object of type int: give a URL such as {SOURCE}"),
    ({"redis": NO_POOL}, f"of type SimpleNamespace: give a URL such as {SOURCE}"),
    ({"redis": Redis().pubsub()}, SOURCE),  # type: ignore[no-untyped-call]
    *(({"redis": value}, FOR_ASYNC) for value in (redis.asyncio.Redis(), redis.asyncio.Redis)),
    ({"redis": valkey.Valkey()}, "redis= a client of valkey-py"),
    ({"redis": valkey.asyncio.Valkey()}, "write the server's URL, redis://"),
    ({"redis": KombusClient(global_keyprefix="a:")}, "write a URL, and prefix='a:only_one:'"),
    ({"redis": lambda: None}, "return a client of redis-py"),
    ({"redis": lambda: valkey.Valkey()}, "write the server's URL"),
    ({"redis": lambda: "localhost"}, f"redis='localhost' is not a URL of Redis: {URL}"),
    ({"redis": lambda: redis.asyncio.Redis()}, FOR_ASYNC),
    ({"redis": lambda url: url}, SOURCE),
    *(({"redis": value}, SOURCE) for value in ASYNC),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS)
def test_an_option_that_cannot_work_is_refused_when_it_is_given(options: dict[str, Any], words: str) -> None:
    """A server is refused by the first call, if not before."""

    def by_the_decorator() -> None:
        decorate = only_one("k", **options)
        if "redis" in options:
            decorate(function)()

    def by_configure() -> None:
        with configure_(**options):
            if "redis" in options:
                only_one("k")(function)()

    if not options.keys() & {"queue_timeout", "active", "prefix"}:
        refused(ConfigurationError, words, by_the_decorator)
    if options.keys() <= set(CONFIGURABLE):
        refused(ConfigurationError, words, by_configure)


GROWING = "countdown=0: write at least 0.001 seconds; for a delay that grows"


def configure_in_turn() -> None:
    with configure(lease=10), configure(timeout=5):
        pass


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: only_one(300, "k"), ConfigurationError, "timeout='k': write seconds"),
        (lambda: only_one("k", key="l"), ConfigurationError, "write one of them"),
        (lambda: only_one(IN_MAIN), KeyTemplateError, "@only_one('two-of-my-program:{md5}'), or start it"),
        (lambda: only_one("{name!r}")(IN_MAIN), KeyTemplateError, "write {name}"),
        (lambda: only_one(lambda _: "k")(two), KeyTemplateError, "key=lambda"),
        (lambda: only_one("k", work_id=generator)(two), KeyTemplateError, "work_id=generator takes ()"),
        (lambda: only_one(key_="k"), TypeError, "key_"),
        (lambda: ExitStack().enter_context(only_one("k")), ConfigurationError, "write the block as a function"),
        (lambda: asyncio.run(AsyncExitStack().enter_async_context(only_one("k"))), ConfigurationError, "above its def"),
        (lambda: configure_(url="redis://localhost"), TypeError, "url"),
        (configure_in_turn, ConfigurationError, SHORTER),
        (lambda: configure_(redis=None), ConfigurationError, SOURCE),
        (current_lock, ConfigurationError, "call it in one, and give its threads the lock"),
        *((lambda policy=each: policy(0), ConfigurationError, GROWING) for each in (retry, buffer_one)),
        (lambda: retry(max_retries=-1), ConfigurationError, "such as 10"),
        (lambda: retry(max_retries=0.5), ConfigurationError, "such as 10"),  # type: ignore[arg-type]
        (lambda: retry(max_retries=True), ConfigurationError, "such as 10"),
        (lambda: subscribe_("print"), ConfigurationError, "hook='print' is"),
        *((functools.partial(subscribe_, each), ConfigurationError, "subscribe(function)") for each in ASYNC),
    ],
)
def test_a_wrong_call_is_refused(call: Callable[[], object], error: type[Exception], words: str) -> None:
    refused(error, words, call)


POLICIES: tuple[Any, ...] = (skip, fail, carry_on, retry, buffer_one)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (lambda error: retry(error), "countdown=AlreadyRunning("),
        (lambda error: carry_on(error), "when_busy ends in carry_on, which would run two at a time: write"),
        (lambda error: retry(max_retries=3), "max_retries=3) was returned by a policy: call it"),
        *((lambda error, each=each: each, f"{each.__name__} was returned") for each in POLICIES),
        (lambda error: asyncio.sleep(0), "coroutine sleep, which nobody would await: write"),
    ],
)
def test_a_policy_that_is_called_by_another(redis: Redis, prefix: str, policy: Any, words: str) -> None:
    redis.set(f"{prefix}k", "another's")
    refused(ConfigurationError, words, only_one("k", when_busy=policy)(function))


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [("ONLY_ONE_ACTIVE", "2", "ONLY_ONE_ACTIVE=0 or"), ("ONLY_ONE_REDIS_URL", "h", "URL='h' is not a URL")],
)
def test_a_variable_of_the_environment_that_cannot_be_understood(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, words: str
) -> None:
    monkeypatch.setenv(variable, value)
    refused(ConfigurationError, words, only_one("k")(function))


@pytest.mark.parametrize("url", ["redis://:hunter2@host:port/0", "redis://host:6379/0?Password=hunter2&x=y"])
def test_a_url_that_is_refused_is_shown_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=URL) as raised:
        only_one("k", redis=url)(function)
    assert "hunter2" not in str(raised.value)


# --- keys --------------------------------------------------------------------------------------------------------

PARAMETERS = "write one of {name}, {md5}, {a}, {b}, {rest}, {c}, {others["


TEMPLATES = [
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
    ("{name:md5}", "write {name}, or rename a parameter that is called so"),
    ("{md5!r}", "write {md5}"),
    ("{name.x}", "key=callable"),
]


@pytest.mark.parametrize(
    ("key", "target", "words"),
    [
        *((template, function, words) for template, words in TEMPLATES),
        ("{md5[x]}", named, "key=callable"),
        ("{name}", lambda: 1, "key=lambda"),
        ("sync:{name}", named, "not its parameter that is called so: rename the parameter or write key=callable"),
        ("{name}", app().task(lazy=False, name="called")(named), "not its parameter that is called so"),
        (None, function, "write a template such as"),
        (lambda: "k", two, "key=<lambda> takes () ("),
        (lambda x, y, z: "k", two, "all parameters"),
        (lambda y: "k", two, "; a bound task's first must be called self"),
        (lambda x: "k", with_self, "all parameters"),  # neither for a function nor for a bound task
        (lambda y: "k", app().task(lazy=False, name="few")(two), "all parameters"),
        *((key, two, "write a plain one") for key in ASYNC),
    ],
)
def test_a_key_that_cannot_work(key: Any, target: Any, words: str) -> None:
    refused(KeyTemplateError, words, lambda: only_one(key=key)(target))


@pytest.mark.usefixtures("redis")
@pytest.mark.parametrize(
    ("key", "arguments", "words"),
    [
        ("{md5}", (1, object()), "'b'"),
        ("{md5}", (1, 2, object()), "'rest'"),
        ("{a:c}", (-1,), "format, or key=callable"),
        ("{a!r}", (10**5000,), "format, or key=callable"),
        ("{md5}", (LazyText(),), "key=callable"),
        ("{a:md5}", (LazyText(),), "key=callable"),
        (lambda *_, **__: b"k", (), "<lambda> returned b'k': ret"),
        (lambda *_, **__: "", (), "return a str"),
        (functools.partial(lambda *_, **__: None), (), "key=functools.partial(<function"),
    ],
)
def test_arguments_that_give_no_key(key: Any, arguments: Any, words: str) -> None:
    """`tests/keys` has more of them."""
    refused(UnkeyableArgument, words, lambda: only_one(key=key)(function)(*arguments))


@pytest.mark.parametrize("decorate", [only_one(), only_one("{md5}")], ids=["no key", "md5"])
def test_a_method_of_a_plain_class_needs_a_key(decorate: Any) -> None:
    def method() -> None:
        class Plain:
            @decorate  # type: ignore[untyped-decorator]
            async def load(self, day: int) -> None: ...

    def class_method() -> None:
        class Plain:
            @classmethod
            @decorate  # type: ignore[untyped-decorator]
            def load(cls, day: int) -> None: ...

    def method_of_a_program() -> None:
        load = FunctionType(with_self.__code__, {"__name__": "__main__"})
        load.__qualname__ = "Plain.load"
        decorate(load)

    for define, key in ((method, "load:{self.id}"), (method_of_a_program, "load:{self.id}"), (class_method, "load")):
        refused(KeyTemplateError, f"@only_one('{key}')", define)
