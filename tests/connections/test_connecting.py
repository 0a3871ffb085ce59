"""Clients that say how to connect: the asyncio client made from one connects, too, and what fails is told as such."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import redis as redis_py
import redis.connection
from celery.exceptions import SoftTimeLimitExceeded

from only_one import ConfigurationError, LockUnavailable, only_one
from rigs.waiting import LIMIT
from tests.clients import Subclass

IN_DJANGO = """
import asyncio, sys
from django.conf import settings

options = {"CONNECTION_POOL_KWARGS": {"max_connections": 10}}
cache = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": sys.argv[1], "OPTIONS": options}
settings.configure(CACHES={"default": cache})

from django_redis import get_redis_connection
from only_one import configure, only_one

client = get_redis_connection("default")
assert "parser_class" in client.connection_pool.connection_kwargs
configure(redis=client, prefix=sys.argv[2])

@only_one("{number}")
async def work(number):
    return number

async def all_at_once():
    return await asyncio.gather(*(work(number) for number in range(1000)))

assert only_one(lambda: "done", key="k")() == "done"
assert asyncio.run(all_at_once()) == list(range(1000))
print("all ran")
"""


def test_the_client_of_django_redis(redis: Any, redis_url: str, prefix: str) -> None:
    command = [sys.executable, "-c", IN_DJANGO, redis_url, prefix]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all ran\n"
    assert not redis.keys(f"{prefix}*")


def test_a_pool_that_names_its_parser_and_what_is_done_when_connected(redis_url: str, prefix: str) -> None:
    assert prefix
    connected: list[type[Any]] = []

    def connect(connection: Any) -> None:
        connected.append(type(connection))
        connection.on_connect()

    options: dict[str, Any] = {"parser_class": redis.connection.DefaultParser, "redis_connect_func": connect}
    with redis_py.Redis(connection_pool=redis_py.ConnectionPool.from_url(redis_url, **options)) as client:

        async def work() -> str:
            return "done"

        assert asyncio.run(only_one(work, key="k", redis=client)()) == "done"
        assert only_one(lambda: "done", key="k", redis=client)() == "done"
    assert {*connected} == {redis.connection.Connection}


class OfOurOwn(redis.connection.Connection):
    """A way to connect that asyncio does not know."""


def test_a_way_to_connect_that_has_no_like_in_asyncio(redis_url: str, prefix: str) -> None:
    assert prefix

    async def work() -> str:
        return "done"

    pool = redis_py.ConnectionPool.from_url(redis_url, connection_class=OfOurOwn)
    with redis_py.Redis(connection_pool=pool) as client:
        assert only_one(lambda: "done", key="k", redis=client)() == "done"
        with pytest.raises(ConfigurationError, match=r"OfOurOwn.*: give redis= as a URL"):
            asyncio.run(only_one(work, key="k", redis=client)())


class SecretsAreElsewhere(Exception):
    """What a provider of credentials may raise, and redis-py knows nothing of."""


class Provider(redis_py.CredentialProvider):
    """Gives no credentials."""

    def __init__(self, refuse: Callable[[], Any]) -> None:
        self.refuse = refuse

    def get_credentials(self) -> Any:
        return self.refuse()

    async def get_credentials_async(self) -> Any:
        return self.refuse()


KINDS: list[type[redis_py.Redis]] = [redis_py.Redis, Subclass]


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_raised_while_connecting(redis_url: str, prefix: str, kind: type[redis_py.Redis]) -> None:
    def refuse() -> Any:
        raise SecretsAreElsewhere

    async def work() -> str:
        return "done"

    with kind.from_url(redis_url, credential_provider=Provider(refuse)) as client:
        for call in (
            only_one(lambda: "done", key="k", redis=client),
            lambda: asyncio.run(only_one(work, key="k", redis=client)()),
        ):
            with pytest.raises(LockUnavailable, match=f"{prefix}k.*SecretsAreElsewhere"):
                call()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_signal_raises_while_connecting_is_no_trouble_of_the_server(
    redis_url: str, prefix: str, kind: type[redis_py.Redis]
) -> None:
    assert prefix

    def soft_time_limit(_number: int, _frame: FrameType | None) -> None:
        raise SoftTimeLimitExceeded

    def interrupt() -> tuple[()]:
        if threading.current_thread() is threading.main_thread():  # not in that which releases what is left behind
            os.kill(os.getpid(), signal.SIGUSR1)
        return ()

    before = signal.signal(signal.SIGUSR1, soft_time_limit)
    try:
        with kind.from_url(redis_url, credential_provider=Provider(interrupt)) as client:
            call = only_one(lambda: "done", key="k", redis=client)
            with pytest.raises(SoftTimeLimitExceeded):
                call()
    finally:
        signal.signal(signal.SIGUSR1, before)
