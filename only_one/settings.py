"""Settings: defaults and checks of all options, ``configure``, the environment's variables, and which of them wins."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from types import EllipsisType
from typing import Annotated, Any, get_type_hints

from .connections.server import Source, check_source
from .errors import ConfigurationError
from .forks import in_each_child
from .option_values import Seconds, check_bool, check_prefix, check_work_id, seconds, seconds_or_none
from .policies import carry_on, check_policy, fail

Options = Mapping[str, Any]
"""Options by name, of one decorator, of ``configure`` or of a Celery app's configuration; times are in seconds."""

DEFAULT_LEASE = 30.0
"""Seconds, if neither ``timeout`` nor ``lease`` is given."""


@dataclass(frozen=True)
class Settings:
    """The options of a function with their checks and defaults.

    ``only_one`` and ``configure`` say what each option is for.
    A check takes the option's name and the user's value, and returns the value in the form in which
    it is used.
    """

    redis: Annotated[Source | None, check_source] = None
    prefix: Annotated[str, check_prefix] = "only_one:"
    timeout: Annotated[float | None, partial(seconds_or_none, instead="for no limit leave it out")] = None
    lease: Annotated[float | None, partial(seconds_or_none, instead="for the default of 30 s leave it out")] = None
    at_least: Annotated[float, partial(seconds, instead="for none leave it out", or_zero=True)] = 0.0
    queue_timeout: Annotated[float, partial(seconds, instead="for the default of 1 h leave it out")] = 3600.0
    when_busy: Annotated[Callable[[Any], Any] | None, check_policy] = None
    when_lost: Annotated[Callable[[Any], Any], check_policy] = carry_on
    when_down: Annotated[Callable[[Any], Any], check_policy] = fail
    takeover: Annotated[bool, check_bool] = True
    work_id: Annotated[Callable[..., object] | None, check_work_id] = None
    active: Annotated[bool | None, check_bool] = None


CHECKS = {name: hint.__metadata__[0] for name, hint in get_type_hints(Settings, include_extras=True).items()}
"""The check of each option."""


def check(given: Options, others: Options) -> Options:
    """Check the options of a decorator, of ``configure`` or of a Celery app's configuration.

    Args:
        given: the options by name.
        others: the options that ``configure`` has set before; none for a decorator and an app,
            whose options are compared with each other only.
            No ``lease`` and no ``at_least`` may be longer than the ``timeout`` of both together.

    Returns:
        The same options, with times in seconds.

    Raises:
        ConfigurationError: for a value that cannot work; the message says what to write instead.
    """
    checked = {name: CHECKS[name](name, value) for name, value in given.items()}
    times = {**others, **checked}
    limit = times.get("timeout")
    for name in ("lease", "at_least"):
        if limit is not None and (times.get(name) or 0) > limit:
            shown = {**others, **given}
            problem = f"{name}={shown[name]!r} is longer than timeout={shown['timeout']!r}"
            msg = f"{problem}: write a shorter {name}, or a longer timeout, or timeout=None for no limit"
            raise ConfigurationError(msg)
    return checked


def merge(*levels: Options) -> Settings:
    """Merge options: each has the value of the first level that gives it, else its default.

    ``timeout`` and ``lease`` come from one level: the first that gives either of them.

    Args:
        levels: the most specific first: the decorator's, those of ``configure``, the Celery app's.
    """
    merged: dict[str, Any] = {}
    for level in reversed(levels):
        if "timeout" in level or "lease" in level:
            merged.update(timeout=None, lease=None)
        merged.update(level)
    if merged.get("timeout") is None and merged.get("lease") is None:
        merged["lease"] = DEFAULT_LEASE
    return Settings(**merged)


current: Options = {}
"""The options set by ``configure``. Each change makes a new mapping, so that code which derives from it can notice."""

_lock = threading.RLock()
in_each_child(_lock._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001 - as the standard library does


class _Override(AbstractContextManager[None]):
    """The options of one call of ``configure``; as a context manager it withdraws them at the end of the block."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.thread = threading.get_ident()
        self.is_entered = False

    def __enter__(self) -> None:
        if self.is_entered or self not in _overrides:
            msg = "the options of this configure(...) have been withdrawn: write with configure(...) for each block"
            raise ConfigurationError(msg)
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        global current  # noqa: PLW0603 - see its docstring
        with _lock:
            # Options that this thread has set for good inside of the block are withdrawn, too; other threads' are not.
            start = _overrides.index(self)
            left = [each for each in _overrides[start + 1 :] if each.is_entered or each.thread != self.thread]
            _overrides[start:] = left
            current = {name: value for override in _overrides for name, value in override.options.items()}


_overrides: list[_Override] = []


def configure(
    *,
    redis: Source | EllipsisType = ...,
    prefix: str | EllipsisType = ...,
    timeout: Seconds | EllipsisType | None = ...,
    lease: Seconds | EllipsisType | None = ...,
    queue_timeout: Seconds | EllipsisType = ...,
    when_busy: Callable[[Any], Any] | EllipsisType = ...,
    takeover: bool | EllipsisType = ...,
    active: bool | EllipsisType = ...,
) -> AbstractContextManager[None]:
    """Set options for every decorator of this process that does not give them itself.

    Options that are not given keep their values; ``...`` stands for those, because None is a value.
    As a context manager, ``configure`` restores the previous options at the end of the block.

    Args:
        redis: the server: a client of redis-py, a URL, or a callable that returns a client.
        prefix: the beginning of every key in Redis; by default ``"only_one:"``.
        timeout: seconds or a timedelta, the longest that a run may hold its key.
        lease: seconds or a timedelta, how long a key outlives a dead holder.
            ``timeout`` and ``lease`` go together: a decorator that gives one of them uses neither
            from here.
        queue_timeout: seconds or a timedelta, how long a task that is unique from queued to
            finished, and has no ``expires``, may wait in its queue before another is queued beside
            it; by default one hour.
        when_busy: the policy for a call whose key is busy.
        takeover: whether a call takes over the key of a holder on this machine whose process is
            dead.
        active: False switches the locking off, so every call runs. So does ``ONLY_ONE_ACTIVE=0`` in
            the environment.

    Returns:
        A context manager; without ``with`` the options stay set.

    Raises:
        ConfigurationError: for a value that cannot work; then nothing is changed.
    """
    global current  # noqa: PLW0603 - see its docstring
    given = {name: value for name, value in locals().items() if value is not ...}
    with _lock:
        override = _Override(check(given, current))
        _overrides.append(override)
        current = {**current, **override.options}
    return override


CONFIGURABLE = tuple(signature(configure).parameters)
"""The names of the options that ``configure`` and a Celery app's configuration accept."""


_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def is_active(settings: Settings) -> bool:
    """Whether keys are acquired at all: as configured, else as ``ONLY_ONE_ACTIVE`` says, else yes.

    Raises:
        ConfigurationError: if the variable's value cannot be understood.
    """
    if settings.active is not None:
        return settings.active
    value = os.environ.get("ONLY_ONE_ACTIVE") or "1"  # compose files pass an unset variable as an empty one
    if value.lower() not in _SWITCH:
        msg = f"the environment has ONLY_ONE_ACTIVE={value!r}: write ONLY_ONE_ACTIVE=0 or ONLY_ONE_ACTIVE=1"
        raise ConfigurationError(msg)
    return _SWITCH[value.lower()]


def source_of(settings: Settings, app_server: Callable[[], Source | None]) -> Source:
    """The server that stores the keys: as configured, of ``ONLY_ONE_REDIS_URL``, of the Celery app, or on localhost.

    Args:
        settings: the effective options.
        app_server: gives the Celery app's own server; it is the third choice.

    Raises:
        ConfigurationError: if the variable is not a URL of Redis.
    """
    if settings.redis is not None:
        return settings.redis
    url = os.environ.get("ONLY_ONE_REDIS_URL")
    return check_source("ONLY_ONE_REDIS_URL", url) if url else app_server() or "redis://localhost:6379/0"
