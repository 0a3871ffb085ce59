"""Clients that say how to connect: the asyncio client made from one connects, too, and what fails is told as such.

A client of django-redis, which names its parser, is in `tests/recipes/test_recipe_django.py`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from encodings import idna
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis as redis_py
import redis.connection
from celery.exceptions import SoftTimeLimitExceeded

from only_one import ConfigurationError, LockUnavailable, current_lock
from only_one.connections import server as servers
from rigs.proxy import Proxy
from rigs.waiting import LIMIT, eventually
from tests.decorated import Decorate, both, call_both, decorated, decorated_async
from tests.interruptions import (
    Interruption,
    garbage_left,
    handled,
    raised_after,
    raises,
    raises_at_first,
    while_handling,
)
from tests.lock.test_leases import RELEASES

pytestmark = pytest.mark.usefixtures("prefix")


@pytest.mark.parametrize("option", [{"parser_class": redis.connection.DefaultParser}, {"decode_responses": True}])
def test_a_client_that_says_how_replies_are_read(redis_url: str, key: str, option: dict[str, Any]) -> None:
    with redis_py.Redis(connection_pool=redis_py.ConnectionPool.from_url(redis_url, **option)) as client:
        assert call_both(redis=client) == ["ran", "ran"]
        client.set(key, b"\xff is no text", ex=600)
        assert call_both(redis=client) == [None, None]


class OfOurOwn(redis.connection.Connection):
    """A way to connect that asyncio does not know."""


def to_another_database(connection: Any) -> None:
    """What a client does when it has connected, and an asyncio client cannot do: it would acquire other keys."""
    connection.on_connect()
    connection.send_command("SELECT", 7)
    connection.read_response()


@pytest.mark.parametrize("option", [{"connection_class": OfOurOwn}, {"redis_connect_func": to_another_database}])
def test_a_way_to_connect_that_has_no_like_in_asyncio(redis_url: str, option: dict[str, Any]) -> None:
    pool = redis_py.ConnectionPool.from_url(redis_url, **option)
    with redis_py.Redis(connection_pool=pool) as client:
        assert decorated(lambda: client.exists(current_lock().key), redis=client)() == 1
        (way,) = option.values()
        with pytest.raises(ConfigurationError, match=rf"{way.__name__}.*: give redis= as a URL"):
            decorated_async(lambda: "done", redis=client)()


def test_an_option_of_tls_that_has_no_like_in_asyncio() -> None:
    """Without it, an asyncio client could trust a server that the user's does not trust."""
    call = decorated_async(lambda: "done", redis=redis_py.Redis(ssl=True, ssl_ocsp_expected_cert="one"))
    with pytest.raises(ConfigurationError, match="with ssl_ocsp_expected_cert: give redis= without"):
        call()


CLUSTER: Any = redis_py.RedisCluster.__new__(redis_py.RedisCluster)  # which has not connected
CLUSTER.nodes_manager = SimpleNamespace(connection_kwargs={}, create_redis_node=None, slots_cache={})
WHO = "write the server's user and password: redis://user:password@host:6379/0"
BY_DEFAULT = redis_py.Redis.from_url("redis://")
SENTINEL: Any = redis.sentinel.Sentinel
REFUSED = redis_py.ConnectionError("Error 111 connecting to localhost:6379. Connection refused.")
YOURS = "start a Redis there, or name yours: ONLY_ONE_REDIS_URL, or configure(redis=...)"
NO_REDIS = "no Redis answers at this port: write the host and the port of one"
NO_TLS = "Timeout connecting to server"
OTHER = "another program stores something else at this key: write another key, or another prefix="


@pytest.mark.parametrize(
    ("client", "error", "told"),
    [
        (redis_py.Redis(host="h"), OSError("away"), "OSError of h:6379: away"),
        (redis_py.Redis(host="h"), redis_py.TimeoutError(NO_TLS), f"TimeoutError of h:6379: {NO_TLS}"),
        (
            redis_py.Redis(host="h", ssl=True),
            redis_py.TimeoutError(NO_TLS),
            f"TimeoutError of h:6379: {NO_TLS} (if the port has no TLS, write redis:// in place of rediss://)",
        ),
        (BY_DEFAULT, redis_py.AuthenticationError(), f"AuthenticationError of localhost:6379:  ({WHO})"),
        (BY_DEFAULT, redis_py.ResponseError("WRONGTYPE"), f"ResponseError of localhost:6379: WRONGTYPE ({OTHER})"),
        (BY_DEFAULT, REFUSED, f"ConnectionError of localhost:6379: {REFUSED} ({YOURS})"),
        (BY_DEFAULT, redis.exceptions.InvalidResponse(), f"InvalidResponse of localhost:6379:  ({NO_REDIS})"),
        (redis_py.Redis(unix_socket_path="/s"), OSError("away"), "OSError of /s: away"),
        (SENTINEL([("a", 1), ("b", 2)]).master_for("m"), OSError("away"), "OSError of m of Sentinel a:1, b:2: away"),
        (CLUSTER, OSError("away"), "OSError of the cluster: away"),
        (CLUSTER, redis.exceptions.MovedError("0 h:1"), "MovedError of the cluster: 0 h:1"),
        (servers._NoClient(OSError()), OSError("away"), "OSError of the server: away"),
    ],
)
def test_what_is_told_of_an_error(client: Any, error: Exception, told: str) -> None:
    assert servers.Server(client).describe(error) == told


class SecretsAreElsewhere(Exception):
    """What a provider of credentials may raise, and redis-py knows nothing of."""


def provider(refuse: Callable[[], Any]) -> Any:
    """Gives no credentials."""
    refuse_async = AsyncMock(side_effect=refuse)
    return Mock(spec=redis_py.CredentialProvider, get_credentials=refuse, get_credentials_async=refuse_async)


def raises_once() -> None:
    raise SecretsAreElsewhere


def raises_its_cause_again() -> None:
    """So the chain of exceptions is a circle, and all are such as redis-py raises in the place of others."""
    url = f"{SecretsAreElsewhere.__name__}://"
    try:
        redis_py.Redis.from_url(url)
    except ValueError as first:
        with pytest.raises(ValueError, match="Redis URL") as second:
            redis_py.Redis.from_url(url)
        first.args = (url,)
        raise first from second.value


def interrupt() -> tuple[()]:
    if threading.current_thread() is threading.main_thread():  # not in that which releases what is left behind
        os.kill(os.getpid(), signal.SIGUSR1)
    return ()


def raises_in_place_of_a_signal_s() -> None:
    try:
        interrupt()
    except SoftTimeLimitExceeded as error:
        raise SecretsAreElsewhere from error


@both
@pytest.mark.parametrize("refuse", [raises_once, raises_its_cause_again, raises_in_place_of_a_signal_s])
def test_whatever_is_raised_while_connecting(
    redis_url: str, prefix: str, decorate: Decorate, refuse: Callable[[], Any]
) -> None:
    client = redis_py.Redis.from_url(redis_url, credential_provider=provider(refuse))
    told = pytest.raises(LockUnavailable, match=f"{prefix}k.*SecretsAreElsewhere")
    with handled(raises(SoftTimeLimitExceeded), signal.SIGUSR1), client, told:
        decorate(lambda: "done", redis=client)()


@both
def test_a_server_that_is_down_while_what_a_signal_has_raised_is_handled(proxy: Proxy, decorate: Decorate) -> None:
    with proxy.cut(), pytest.raises(LockUnavailable):
        while_handling(SoftTimeLimitExceeded, decorate(lambda: "done", redis=proxy.url))


def test_what_a_signal_raises_while_connecting_is_no_trouble_of_the_server(redis_url: str) -> None:
    def look_up() -> Any:
        try:
            raises_once()
        except SecretsAreElsewhere:
            return interrupt()

    with (
        handled(raises(SoftTimeLimitExceeded), signal.SIGUSR1),
        redis_py.Redis.from_url(redis_url, credential_provider=provider(look_up)) as client,
        pytest.raises(SoftTimeLimitExceeded) as caught,
    ):
        decorated(lambda: "done", redis=client)()
    assert type(caught.value.__context__) is SecretsAreElsewhere


@pytest.mark.sees_mutmut
def test_what_a_signal_raises_while_a_host_is_encoded_reaches_the_caller(redis_url: str) -> None:
    """Until Python 3.11, a codec's error is raised as another one of the same class."""

    def at_encode(frame: Any, event: str, _: object) -> None:
        if event == "call" and frame.f_code is idna.Codec.encode.__code__:
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGUSR1)

    run = decorated(lambda: None, redis=f"{redis_url}?client_name=encoded")
    sys.setprofile(at_encode)
    with handled(raises(SoftTimeLimitExceeded), signal.SIGUSR1), pytest.raises(SoftTimeLimitExceeded):
        run()


class Handler:
    """A handler that is an object."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __call__(self, *_: object) -> None:
        raise self.error


HANDLERS: list[Callable[[type[BaseException]], Callable[..., None]]] = [
    raises,
    raises_at_first,
    Handler,
    lambda error: Handler(error).__call__,
    lambda error: partial(raises(error)),
]


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, Interruption])
@pytest.mark.parametrize("names", [("SET",), RELEASES], ids=["acquire", "release"])
@pytest.mark.parametrize("handler", HANDLERS, ids=["function", "at first", "object", "method", "partial"])
def test_what_a_signal_raises_while_a_reply_is_awaited_reaches_the_caller_and_the_key_is_freed(
    proxy: Proxy, redis: redis_py.Redis, key: str, error: type[BaseException], names: tuple[str, ...], handler: Any
) -> None:
    run = decorated(lambda: None, redis=proxy.url)
    run()
    held = proxy.hold_up(*names)
    with raised_after(held.met, error, handler), pytest.raises(error):
        run()
    held.let_go()
    assert eventually(lambda: not redis.exists(key))


@pytest.mark.sees_mutmut
@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, Interruption])
@pytest.mark.parametrize("names", [("HELLO", "CLIENT"), ("SET",), RELEASES], ids=["connecting", "acquire", "release"])
def test_what_another_thread_raises_while_a_reply_is_awaited_reaches_the_caller_and_the_key_is_freed(
    proxy: Proxy, redis: redis_py.Redis, key: str, error: type[BaseException], names: tuple[str, ...]
) -> None:
    """As time limits do: Python raises it in the code that runs there, with no frame of the other thread.

    There is not the main thread: to that it does not come in Python 3.11 once a thread could not be started there.
    """
    held = proxy.hold_up(*names)
    with ThreadPoolExecutor(1) as pool, garbage_left(), BY_DEFAULT.from_url(proxy.url) as client:
        there = pool.submit(threading.get_ident).result()
        called = pool.submit(decorated(lambda: None, redis=client))
        assert held.met.wait(LIMIT)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(there), ctypes.py_object(error))
        held.let_go()
        with pytest.raises(error):
            called.result(LIMIT)
    assert eventually(lambda: not redis.exists(key))
