"""Inspection: list the keys that are held, find the holder of a call's key, and release keys by hand.

To look acquires no key. A release compares the value that was seen: another holder keeps its key.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from redis.exceptions import AskError
from redis.exceptions import ConnectionError as RedisConnectionError

from . import settings
from .connections.nodes import ClusterNodes, Node
from .connections.server import Server, Source, find_server
from .connections.server_features import is_of_another_type
from .decorator import configured_by_app, is_task
from .driver import Command, Commands, drive
from .errors import ConfigurationError
from .forks import see_fork
from .holder import Holder
from .lock.commands import release_now
from .lock.liveness import is_dead
from .lock.token import machine

_AT_ONCE = 500


class Held(NamedTuple):
    """A key that is held, as it was when it was read.

    Attributes:
        key: the key as it is in Redis, with its prefix; bytes that are not UTF-8 are escaped in it.
        value: the value that is stored there, which ``release_key`` compares; empty for a list, a
            hash and the like.
        expires_in: seconds until the key expires, unless it is renewed, and at least 0; None for
            never.
        process: whether the holder's process was alive: ``"alive"``, ``"dead"`` (also if its call has
            ended without releasing the key), or ``"unknown"`` (it is on another machine, or this
            machine cannot be identified); None if no process holds the key.
    """

    key: str
    value: bytes
    expires_in: float | None
    process: Literal["alive", "dead", "unknown"] | None

    @property
    def holder(self) -> Holder | None:
        """The ``Holder`` that the value names; None if the value is not a holder of only_one."""
        return Holder.parse(self.value)


def held(match: str = "*", *, redis: Source | None = None, app: Any = None) -> Iterator[Held]:
    """List the keys that are held, in no order. Keys that change meanwhile may be listed or not.

    Args:
        match: a pattern of keys without the prefix, as Redis understands it: ``*``, ``?``,
            ``[abc]``.
        redis: another server than the configured one: a client, a URL, or a callable that returns a
            client.
        app: the Celery app whose settings apply; by default that of the process, as for plain
            functions.

    Yields:
        Each key, as it was when it was read.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked.
        ConfigurationError: for settings that cannot work.
    """
    server, prefix = _configured(redis, app)
    pattern = "".join(f"\\{each}" for each in prefix) + match  # the prefix has no wildcards
    return _scan(server, pattern)


def held_key(key: str, *, redis: Source | None = None, app: Any = None) -> Held | None:
    """Look at one key, as ``held`` shows it.

    Args:
        key: the key without its prefix, or as it is in Redis.
        redis: another server than the configured one: a client, a URL, or a callable that returns a
            client.
        app: the Celery app whose settings apply; by default that of the process, as for plain
            functions.

    Returns:
        The key, or None if it is free.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked.
        ConfigurationError: for settings that cannot work.
    """
    server, prefix = _configured(redis, app)
    names = [prefix + key, key] if key.startswith(prefix) else [prefix + key]
    nodes = _nodes_of(server)
    nodes.all()  # a cluster's slots may have moved
    encoded = [name.encode(errors="surrogateescape") for name in names]
    return next((each for name in encoded for each in _read(server, nodes.node_of(name), [name])), None)


def key_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> str:
    """Make the key of a call, without running it.

    Args:
        function: a decorated function, or a Celery task that is decorated or whose function is.
        *args: the call's arguments, without the task itself.
        **kwargs: the call's keyword arguments.

    Returns:
        The key as it is in Redis, with its prefix.

    Raises:
        ConfigurationError: if the function is not decorated, or the locking is switched off.
        UnkeyableArgument: as in the call itself.
    """
    return _call(function, args, kwargs)[1]


def holder_of(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Holder | None:
    """Find the holder of a call's key. See ``key_of`` for the arguments, and for further errors.

    Returns:
        The holder; None if the key is free, or its value is not a holder of only_one.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked, or stores a list or the like at
            the key.
    """
    server, key = _call(function, args, kwargs)
    return Holder.parse(_ask(server.client, ("GET", key)) or b"")


def release(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Release the key of a call, whoever holds it. See ``key_of`` for the arguments, and for further errors.

    A run that holds the key goes on, and learns that it has lost its key.

    Returns:
        Whether the key was released; False if it was free, or just now got another holder, who
        keeps it.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked, or stores a list or the like at
            the key.
    """
    server, key = _call(function, args, kwargs)
    value = _ask(server.client, ("GET", key))
    return value is not None and release_now(server.client, server.features, key, value).status == "held"


def release_key(key: str, token: str | bytes, *, redis: Source | None = None, app: Any = None) -> bool:
    """Release a key if the value that was seen is still stored there.

    Args:
        key: the key as it is in Redis, as ``Held.key`` shows it.
        token: the value that was seen there, as ``Held.value`` shows it.
        redis: another server than the configured one: a client, a URL, or a callable that returns a
            client.
        app: the Celery app whose settings apply; by default that of the process, as for plain
            functions.

    Returns:
        Whether the key was released.

    Raises:
        redis.exceptions.RedisError: if the server cannot be asked.
        ConfigurationError: for settings that cannot work.
    """
    server, _ = _configured(redis, app)
    value = token.encode() if isinstance(token, str) else token
    return release_now(server.client, server.features, key.encode(errors="surrogateescape"), value).status == "held"


def _configured(redis: Source | None, app: Any) -> tuple[Server, str]:
    """The server and the prefix of a decorator that names neither."""
    see_fork()
    of_app, app_server = configured_by_app(app)
    merged = settings.merge(settings.current, of_app)
    source = settings.source_of(merged, app_server) if redis is None else redis
    return find_server(source), merged.prefix


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Server, str]:
    """The server and the key of a call."""
    if is_task(function):
        from only_one.celery import task_functions  # noqa: PLC0415 - not before Celery is there

        function = task_functions.task_behind(function)
        decoration = next(iter(task_functions.decorations_of(function)), None)
        caller = task_functions.caller_from_outside(function, decoration) if decoration else None
    else:
        if inspect.ismethod(function):
            args = (function.__self__, *args)
        decoration = getattr(function, "__only_one__", None)
        caller = decoration.plain if decoration else None
    if decoration is None or caller is None:
        msg = f"{function!r} is not decorated: write @only_one above it, or give the decorated one"
        raise ConfigurationError(msg)
    options = decoration.options_for(caller)
    key = decoration.make_key(caller, (function, *args) if caller.bound else args, kwargs)
    if options.server is None:
        msg = "the locking is switched off, and no key is held: write active=True, or unset ONLY_ONE_ACTIVE"
        raise ConfigurationError(msg)
    return options.server, options.prefix + key


def _ask(client: Any, command: Command) -> Any:
    """The reply to a command, which is sent again, as a call's is, if the server has closed the connection."""

    def alone() -> Commands[Any]:
        return (yield command)

    return drive(client, alone())


def _nodes_of(server: Server) -> ClusterNodes | Node:
    """The nodes that store the keys, asked with the time-outs of the user's client."""
    return server.client if isinstance(server.client, ClusterNodes) else Node(server.client)


def _scan(server: Server, pattern: str) -> Iterator[Held]:
    seen: set[bytes] = set()  # SCAN may show a key more than once
    for node in _nodes_of(server).all():
        cursor: Any = 0
        while cursor != b"0":
            cursor, batch = _ask(node.client, ("SCAN", cursor, "MATCH", pattern, "COUNT", _AT_ONCE))
            if unseen := {*batch} - seen:
                yield from _read(server, node, list(unseen))
            seen |= unseen


def _read(server: Server, node: Node, keys: list[bytes]) -> Iterator[Held]:
    """The values that are stored at keys of one node, in one trip for all of them."""
    commands = [(name, key) for key in keys for name in ("GET", "PTTL")]
    replies = node.send(commands, pause=0.0)
    for number, reply in enumerate(replies):
        # AskError is the base class of MovedError: the slot is moving. Or the server has closed the connection.
        if isinstance(reply, (AskError, RedisConnectionError)):
            replies[number] = _ask(server.client, commands[number])
    for key, stored, milliseconds in zip(keys, replies[::2], replies[1::2], strict=True):
        value: Any = b"" if is_of_another_type(stored) else stored
        for reply in (value, milliseconds):
            if isinstance(reply, Exception):
                raise reply
        if value is not None:
            shown = key.decode(errors="surrogateescape")
            # -2 if the key has expired meanwhile.
            expires_in = None if milliseconds == -1 else max(0, milliseconds) / 1000
            yield Held(shown, value, expires_in, _process(value))


def _process(value: bytes) -> Literal["alive", "dead", "unknown"] | None:
    holder = Holder.parse(value)
    if holder is None or holder.state not in ("running", "received"):
        return None
    if is_dead(value):
        return "dead"
    return "alive" if holder.machine == machine() else "unknown"
