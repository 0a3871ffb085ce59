"""Look at the keys that are held, and free them: nothing is taken in order to look, and nothing is freed unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal, NamedTuple

from redis.exceptions import ResponseError

from . import settings
from .errors import ConfigurationError
from .holder import Holder, is_dead, machine
from .lock import RAW, give_back
from .plan import Cover
from .servers import Server, Source, find_server
from .wrapper import configured_by_app, is_task

_AT_ONCE = 500


class Held(NamedTuple):
    """A key that is held.

    Attributes:
        key: the key as it is in Redis; bytes that are no text are spelt out in it.
        value: what stands there, which `release_key` compares; empty for a list, a hash and the like.
        expires_in: seconds until it expires, unless it is renewed; None for never.
        process: whether the process that holds it lived when this was read: "unknown" from another machine; None where
            no process holds it.
    """

    key: str
    value: bytes
    expires_in: float | None
    process: Literal["alive", "dead", "unknown"] | None

    @property
    def holder(self) -> Holder | None:
        """Who holds it, or None where the value is not one of ours."""
        return Holder.parse(self.value)


class Place(NamedTuple):
    """Where keys are kept.

    Attributes:
        server: the server.
        prefix: what every key begins with.
    """

    server: Server
    prefix: str


def place_of(redis: Source | None, app: Any) -> Place:
    """Where the keys are kept of a decorator that does not say it.

    Args:
        redis: a client, a URL or a callable that returns a client, for another server than the configured one.
        app: the Celery app whose settings hold, too; without one that of the process, as for plain functions.

    Raises:
        ConfigurationError: for settings that could not work.
    """
    of_app, app_server = configured_by_app(app)
    merged = settings.merge(settings.current, of_app)
    source = settings.source_of(merged, app_server) if redis is None else redis
    return Place(find_server(source), merged.prefix)


def held(match: str = "*", *, redis: Source | None = None, app: Any = None) -> Iterator[Held]:
    """The keys that are held, in no order; what is taken or freed meanwhile may be there or not.

    Args:
        match: a pattern of keys, without the prefix, as Redis understands it: `*`, `?`, `[abc]`.
        redis: a client, a URL or a callable that returns a client, for another server than the configured one.
        app: the Celery app whose settings hold, too; without one that of the process, as for plain functions.

    Yields:
        Each key, as it was when it was read.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked.
        ConfigurationError: for settings that could not work.
    """
    return held_in(place_of(redis, app), match)


def held_in(place: Place, match: str) -> Iterator[Held]:
    """The same for a place."""
    client: Any = place.server.client
    pattern = "".join(f"\\{each}" for each in place.prefix) + match  # no character of the prefix means more than itself
    scanned = client.scan_iter(match=pattern, count=_AT_ONCE, **RAW)
    seen: set[bytes] = set()  # SCAN may show a key more than once
    while found := set(islice(scanned, _AT_ONCE)):
        yield from _read(client, list(found - seen))
        seen |= found


def read(place: Place, key: str) -> Held | None:
    """What is held under one key; None if it is free."""
    return next(_read(place.server.client, [_as_in_redis(key)]), None)


def key_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """The key of a call, as it is in Redis.

    Args:
        function: a covered function, or a Celery task that is covered or whose function is.
        *args: the call's arguments, without the task itself.
        **kwargs: the same by keyword.

    Raises:
        ConfigurationError: if it is not covered.
        UnkeyableArgument: as in the call itself.
    """
    return _call(function, args, kwargs)[1]


def holder_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Holder | None:
    """Who holds the key of a call; None if it is free, or is held by something that is not ours.

    See `key_of` for the arguments.
    """
    server, key = _call(function, args, kwargs)
    value = _value(server.client, key)
    return None if value is None else Holder.parse(value)


def release(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Free the key of a call, whoever holds it.

    A run that holds it goes on, and learns that it has lost its key.
    See `key_of` for the arguments.

    Returns:
        Whether it was freed; False if it was free, or has gone to somebody else in this moment, who keeps it.
    """
    server, key = _call(function, args, kwargs)
    value = _value(server.client, key)
    return value is not None and give_back(server.client, server.dialect, key, value).fate == "held"


def release_key(key: str, token: str | bytes, *, redis: Source | None = None, app: Any = None) -> bool:
    """Free a key if it still holds what was seen there.

    Args:
        key: the key as it is in Redis, as `Held.key` shows it.
        token: what was seen there, as `Held.value` shows it.
        redis: a client, a URL or a callable that returns a client, for another server than the configured one.
        app: the Celery app whose settings hold, too; without one that of the process, as for plain functions.

    Returns:
        Whether it was freed.
    """
    return release_in(place_of(redis, app), key, token)


def release_in(place: Place, key: str, token: str | bytes) -> bool:
    """The same for a place."""
    value = token.encode() if isinstance(token, str) else token
    return give_back(place.server.client, place.server.dialect, _as_in_redis(key), value).fate == "held"


def _as_shown(key: bytes) -> str:
    return key.decode(errors="surrogateescape")


def _as_in_redis(key: str) -> bytes:
    return key.encode(errors="surrogateescape")


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Server, str]:
    """The server and the key of a call by hand."""
    if is_task(function):
        return _call_of_task(function, args, kwargs)
    cover: Cover | None = getattr(function, "__only_one__", None)
    if cover is None:
        raise _not_covered(function)
    plan = cover.plan_for(cover.plain)
    return _server(plan.server), plan.prefix + cover.make_key(cover.plain, args, kwargs)


def _call_of_task(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Server, str]:
    from .tasks.promises import task_behind  # noqa: PLC0415 - not before Celery is there
    from .tasks.task_call import call_from_outside, key_from_outside  # noqa: PLC0415
    from .tasks.wrapping import covers_of  # noqa: PLC0415

    task = task_behind(found)
    cover = next(iter(covers_of(task)), None)
    if cover is None:
        raise _not_covered(task)
    call = call_from_outside(task, cover)
    return _server(cover.plan_for(call).server), key_from_outside(task, cover, call, args, kwargs)


def _server(server: Server | None) -> Server:
    if server is None:
        msg = "the locking is switched off, and no key is held: write active=True, or take ONLY_ONE_ACTIVE=0 away"
        raise ConfigurationError(msg)
    return server


def _not_covered(function: Any) -> ConfigurationError:
    return ConfigurationError(f"{function!r} is not covered: write @only_one above it, or give the covered function")


def _read(client: Any, keys: list[bytes]) -> Iterator[Held]:
    """What stands under keys, in one trip for all of them."""
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.execute_command("GET", key, **RAW)
        pipeline.execute_command("PTTL", key, **RAW)
    replies: Iterator[Any] = iter(pipeline.execute(raise_on_error=False))
    for key in keys:
        found, milliseconds = next(replies), next(replies)
        value: Any = b"" if isinstance(found, ResponseError) and "WRONGTYPE" in str(found) else found
        for reply in (value, milliseconds):
            if isinstance(reply, Exception):
                raise reply
        if value is not None:
            yield Held(_as_shown(key), value, None if milliseconds == -1 else milliseconds / 1000, _process(value))


def _process(value: bytes) -> Literal["alive", "dead", "unknown"] | None:
    holder = Holder.parse(value)
    if holder is None or holder.state not in ("running", "received"):
        return None
    if is_dead(value):
        return "dead"
    return "alive" if holder.machine == machine() else "unknown"


def _value(client: Any, key: str) -> bytes | None:
    value: bytes | None = client.execute_command("GET", key, **RAW)
    return value
