"""What holds for every decorator that does not say otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

from .callables import check_callable
from .errors import ConfigurationError
from .policies import BufferOne, Retry, buffer_one, carry_on, retry, skip
from .servers import Source, check_source
from .times import Seconds, seconds


class Unset:
    """Not given; None is a value that can be given."""

    def __repr__(self) -> str:
        return "…"


UNSET = Unset()


class Settings(NamedTuple):
    """What `configure` has been told; the fields are its parameters."""

    redis: Any = UNSET
    prefix: Any = UNSET
    timeout: Any = UNSET
    lease: Any = UNSET
    queue_timeout: Any = UNSET
    when_busy: Any = UNSET
    takeover: Any = UNSET
    active: Any = UNSET

    def over(self, others: Settings) -> Settings:
        """These, and the `others` where they say nothing; `timeout` and `lease` come from one of them together."""
        has_times = self.timeout is not UNSET or self.lease is not UNSET
        times = {name: getattr(self if has_times else others, name) for name in ("timeout", "lease")}
        merged = {name: getattr(others, name) if value is UNSET else value for name, value in self._asdict().items()}
        return Settings(**{**merged, **times})


current = Settings()
"""Replaced as a whole by `configure`, so that whoever has derived something from it sees that it is another."""


DEFAULT_PREFIX = "only_one:"
DEFAULT_LEASE = 30.0
DEFAULT_QUEUE_TIMEOUT = 3600.0
DEFAULT_URL = "redis://localhost:6379/0"

_ON = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


_lock = threading.RLock()


class _Layer(AbstractContextManager[None]):
    """What one `configure` has given; as a context manager it is taken back at the end of the block."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        with _lock:
            # With what was configured for good inside of the block, but not what other blocks hold, in other threads.
            above = _layers.index(self)
            _layers[above:] = [layer for layer in _layers[above:] if layer.is_entered and layer is not self]
            _combine()


_layers: list[_Layer] = []


def _combine() -> None:
    global current  # noqa: PLW0603 - see its docstring
    current = Settings(**{name: value for layer in _layers for name, value in layer.given.items()})


def configure(
    *,
    redis: Source | Unset = UNSET,
    prefix: str | Unset = UNSET,
    timeout: Seconds | Unset | None = UNSET,
    lease: Seconds | Unset | None = UNSET,
    queue_timeout: Seconds | Unset = UNSET,
    when_busy: Callable[[Any], Any] | Unset = UNSET,
    takeover: bool | Unset = UNSET,
    active: bool | Unset = UNSET,
) -> AbstractContextManager[None]:
    """Set what holds for every decorator of this process that does not say otherwise.

    What is not given stays as it is.
    As a context manager it restores at the end what was in force before.

    Args:
        redis: the server: a client, a URL, or a callable that returns a client.
        prefix: what every key begins with in Redis (`only_one:`).
        timeout: seconds or timedelta, the longest that a run may hold its key.
        lease: seconds or timedelta, how long a key outlives a dead holder.
            `timeout` and `lease` go together: a decorator that gives one of them takes neither from here.
        queue_timeout: seconds or timedelta for which a task that is covered from queued to finished, and has no
            `expires`, may wait in its queue before another is queued beside it (1 h).
        when_busy: what a call gives when its key is taken.
        takeover: whether a holder on this machine whose process is dead does not block.
        active: False switches the locking off, so that every call runs; so does the environment's `ONLY_ONE_ACTIVE=0`.

    Raises:
        ConfigurationError: for a value that could not work; nothing is changed.
    """
    given = {name: value for name, value in locals().items() if value is not UNSET}
    check(given)
    layer = _Layer(given)
    with _lock:
        check_times(given.get("timeout", current.timeout), given.get("lease", current.lease))
        _layers.append(layer)
        _combine()
    return layer


def check(given: Mapping[str, Any]) -> None:
    """Refuse settings that could not work; `timeout` and `lease` are looked at by `check_times`.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if "redis" in given:
        check_source(given["redis"])
    if "prefix" in given:
        check_prefix(given["prefix"])
    if "when_busy" in given:
        check_when_busy(given["when_busy"])
    if "queue_timeout" in given:
        seconds("queue_timeout", given["queue_timeout"], "for the default of 1 h leave it out")
    check_takeover(given.get("takeover", UNSET))
    if "active" in given and not isinstance(given["active"], bool):
        msg = f"active={given['active']!r}: write active=True or active=False"
        raise ConfigurationError(msg)


def check_prefix(prefix: object) -> None:
    """Refuse a prefix with braces: they would move some keys of a cluster to other slots than those beside them.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if not isinstance(prefix, str) or "{" in prefix or "}" in prefix:
        msg = f"prefix={prefix!r}: write a str without braces, such as prefix='myapp:only_one:'"
        raise ConfigurationError(msg)


def check_policy(name: str, policy: Any) -> None:
    """Refuse a policy that cannot be called.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    instead = "write skip, fail, or any callable that takes the error and returns the result"
    if not callable(policy):
        msg = f"{name}={policy!r}: {instead}"
        raise ConfigurationError(msg)
    for each in (retry, buffer_one):
        if policy is each:
            msg = f"{name}={each.__name__}: write {name}={each.__name__}(), with parentheses"
            raise ConfigurationError(msg)
    if isinstance(policy, BufferOne) and name != "when_busy":
        msg = f"{name}=buffer_one() needs the server to say which task is the newest: write {name}=retry()"
        raise ConfigurationError(msg)
    check_callable(name, policy, 1, instead)


def check_when_busy(policy: object) -> None:
    """Refuse what is no policy for a busy key.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    check_policy("when_busy", policy)
    if policy is carry_on:
        msg = "when_busy=carry_on would run two at a time: write when_busy=skip or when_busy=fail"
        raise ConfigurationError(msg)


def check_when_lost(policy: object) -> None:
    """Refuse what is no policy for a lost key.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if isinstance(policy, (Retry, BufferOne)):
        msg = "when_lost is too late to wait: write when_lost=fail to stop the run, and the task may retry by itself"
        raise ConfigurationError(msg)
    check_policy("when_lost", policy)
    if policy is skip:
        msg = (
            "when_lost=skip: the run has begun; write when_lost=carry_on to let it go on, or when_lost=fail to stop it"
        )
        raise ConfigurationError(msg)


def check_takeover(takeover: object) -> None:
    """Refuse what is neither True nor False.

    Raises:
        ConfigurationError: saying what to write instead.
    """
    if takeover is not UNSET and not isinstance(takeover, bool):
        msg = f"takeover={takeover!r}: write takeover=True or takeover=False"
        raise ConfigurationError(msg)


def check_at_least(at_least: object, limit: float | None) -> float:
    """`at_least` in seconds; 0 for a key that is given back at once.

    Raises:
        ConfigurationError: for a time that could not work.
    """
    if at_least in (0, timedelta(0)) and not isinstance(at_least, bool):
        return 0.0
    kept = seconds("at_least", at_least, "for none leave it out")
    if limit is not None and kept > limit:
        msg = f"at_least={at_least!r} is longer than timeout={limit:g}: write a shorter one, or leave one of them out"
        raise ConfigurationError(msg)
    return kept


def check_times(timeout: object, lease: object) -> tuple[float | None, float | None]:
    """`timeout` and `lease` in seconds, with None for what is not given.

    Raises:
        ConfigurationError: for times that could not work.
    """
    limit = None if _absent(timeout) else seconds("timeout", timeout, "for no limit leave it out")
    renewed = None if _absent(lease) else seconds("lease", lease, "for the default of 30 s leave it out")
    if limit is not None and renewed is not None and renewed > limit:
        msg = f"lease={lease!r} is longer than timeout={timeout!r}: write a shorter lease, or leave one of them out"
        raise ConfigurationError(msg)
    return limit, renewed


def queue_timeout_of(settings: Settings) -> float:
    """`queue_timeout` in seconds."""
    given: Seconds = most_specific(settings.queue_timeout, DEFAULT_QUEUE_TIMEOUT)
    return given.total_seconds() if isinstance(given, timedelta) else given


def _absent(value: object) -> bool:
    return value is None or value is UNSET


def is_active(settings: Settings) -> bool:
    """Whether keys are taken at all: as configured, else as `ONLY_ONE_ACTIVE` says, else yes.

    Raises:
        ConfigurationError: if the environment says what cannot be understood.
    """
    if settings.active is not UNSET:
        return bool(settings.active)
    said = os.environ.get("ONLY_ONE_ACTIVE") or "1"  # empty, as compose files pass what is not set
    try:
        return _ON[said.lower()]
    except KeyError:
        msg = f"the environment has ONLY_ONE_ACTIVE={said!r}: write ONLY_ONE_ACTIVE=0 or ONLY_ONE_ACTIVE=1"
        raise ConfigurationError(msg) from None


def source_of(settings: Settings, otherwise: Callable[[], Source | None] = lambda: None) -> Source:
    """Where the keys are kept, for a decorator that does not say.

    Args:
        settings: what has been configured.
        otherwise: asked where neither they nor `ONLY_ONE_REDIS_URL` say it, and before the default.

    Raises:
        ConfigurationError: if the environment's URL is none.
    """
    if settings.redis is not UNSET:
        return settings.redis
    url = os.environ.get("ONLY_ONE_REDIS_URL")
    if url:
        check_source(url, "ONLY_ONE_REDIS_URL")
        return url
    return otherwise() or DEFAULT_URL


def _begin_anew_in_child() -> None:
    global _lock  # noqa: PLW0603 - it may have been held by a thread that the child does not have
    _lock = threading.RLock()


with suppress(AttributeError):  # where nothing forks
    os.register_at_fork(after_in_child=_begin_anew_in_child)


def most_specific(*values: Any) -> Any:
    """The first value that is set; the last is the default."""
    return next(value for value in values if value is not UNSET)
