"""The errors carry what is known, and still do after a trip to another process."""

# ruff: noqa: ARG001 - fixtures that configure something are asked for by name

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from celery import Celery
from kombu.utils import json
from redis import Redis
from redis.exceptions import RedisError

import only_one as package
from only_one import (
    AlreadyRunning,
    ConfigurationError,
    KeyTemplateError,
    LockLost,
    LockUnavailable,
    OnlyOneError,
    UnkeyableArgument,
    carry_on,
    current_lock,
    only_one,
)
from only_one.lock.token import TokenFactory

KeyIsBusy = Callable[..., AbstractContextManager[None]]
CLOSED = "redis://127.0.0.1:1/0"


def already_running(busy: KeyIsBusy) -> AlreadyRunning:
    """As a caller meets it."""
    with busy("k", timeout=600):
        error = only_one("k", when_busy=lambda error: error)(lambda: None)()
    assert isinstance(error, AlreadyRunning)
    return error


def lock_lost() -> LockLost:
    """As a run meets it."""

    def work() -> LockLost:
        with pytest.raises(LockLost) as raised:
            current_lock().ensure_held()
        return raised.value

    error = only_one(work, key="k", redis=CLOSED, when_down=carry_on)()
    assert error is not None
    return error


def lock_unavailable() -> LockUnavailable:
    """As a caller meets it."""
    error = only_one(lambda: None, key="k", redis=CLOSED, when_down=lambda error: error)()
    assert isinstance(error, LockUnavailable)
    return error


def work(a: object) -> None:
    """Something to cover."""


def raised_by(wrong: Callable[[], object]) -> OnlyOneError:
    """The error that a wrong use raises."""
    with pytest.raises(OnlyOneError) as raised:
        wrong()
    return raised.value


@pytest.fixture(
    params=[
        "AlreadyRunning",
        "LockLost",
        "LockUnavailable",
        "KeyTemplateError",
        "UnkeyableArgument",
        "ConfigurationError",
    ]
)
def error(request: pytest.FixtureRequest, redis: Redis, busy: KeyIsBusy) -> OnlyOneError:
    """One of each, made by the product itself."""
    made: dict[str, Callable[[], OnlyOneError]] = {
        "AlreadyRunning": lambda: already_running(busy),
        "LockLost": lock_lost,
        "LockUnavailable": lock_unavailable,
        "KeyTemplateError": lambda: raised_by(lambda: only_one("{")(work)),
        "UnkeyableArgument": lambda: raised_by(lambda: only_one("{a:md5}")(work)(object())),
        "ConfigurationError": lambda: raised_by(lambda: only_one("k", 0)),
    }
    result = made[request.param]()
    assert type(result).__name__ == request.param
    return result


def same(error: Any, copied: Any) -> bool:
    """Whether an error has come through whole."""
    assert type(copied) is type(error)
    assert copied.args == error.args
    assert str(copied) == str(error) != ""
    assert repr(copied) == repr(error)
    for attribute in ("key", "holder", "task_id", "reason"):
        assert hasattr(copied, attribute) == hasattr(error, attribute)
        assert getattr(copied, attribute, None) == getattr(error, attribute, None)
    return True


def test_an_error_survives_every_trip(error: OnlyOneError) -> None:
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        assert same(error, pickle.loads(pickle.dumps(error, protocol)))  # noqa: S301
    assert same(error, copy.copy(error))
    sent = json.dumps([type(error).__module__, type(error).__name__, error.args])  # type: ignore[no-untyped-call]
    module, name, args = json.loads(sent)  # type: ignore[no-untyped-call]
    assert same(error, getattr(importlib.import_module(module), name)(*args))
    backend = Celery("shop", backend="cache+memory://", set_as_current=False).backend
    stored = json.dumps(backend.prepare_exception(error, "json"))  # type: ignore[no-untyped-call]
    assert same(error, backend.exception_to_python(json.loads(stored)))  # type: ignore[no-untyped-call]


def test_the_repr_of_an_error_is_its_sentence(error: OnlyOneError) -> None:
    assert repr(error) == f"{type(error).__name__}({str(error)!r})"


def test_every_error_has_one_root() -> None:
    names = [
        "AlreadyRunning",
        "LockLost",
        "LockUnavailable",
        "KeyTemplateError",
        "UnkeyableArgument",
        "ConfigurationError",
    ]
    for name in names:
        assert issubclass(getattr(package, name), OnlyOneError)
        assert name in package.__all__
    assert issubclass(KeyTemplateError, ValueError)
    assert issubclass(UnkeyableArgument, TypeError)
    for other in (AlreadyRunning, LockLost, LockUnavailable, ConfigurationError):
        assert not issubclass(other, (ValueError, TypeError, RedisError))


def test_already_running_knows_the_task() -> None:
    bare = AlreadyRunning("k")
    assert (bare.key, bare.holder, bare.task_id) == ("k", None, None)
    assert "k" in str(bare)
    assert AlreadyRunning("k", TokenFactory("t", "the-id").token(None).decode()).task_id == "the-id"


def test_the_others_say_what_they_know() -> None:
    assert str(LockLost("k", "deleted")) == "k is lost: deleted"
    lost = LockLost("k", "taken", TokenFactory("t").token(None).decode())
    assert str(lost) == f"k is lost: taken, now held by {lost.holder}"
    assert str(LockUnavailable("k", "why")) == "k could not be acquired: why"


def test_what_is_left_out_is_told_to_other_processes_all_the_same() -> None:
    made = [AlreadyRunning(key="k"), LockLost(key="k", reason="deleted"), LockUnavailable(key="k")]
    assert [each.args for each in made] == [("k", ""), ("k", "deleted", ""), ("k", "")]
