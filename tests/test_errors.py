"""The errors carry what is known, and still do after a trip to another process."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from celery import Celery
from kombu.utils import json
from redis.exceptions import RedisError

import only_one as package
from only_one.errors import (
    AlreadyRunning,
    ConfigurationError,
    KeyTemplateError,
    LockLost,
    LockUnavailable,
    OnlyOneError,
    UnkeyableArgument,
)
from only_one.lock.token import TokenFactory

TOKEN = TokenFactory("t", "the-id").token(None).decode()
HOLDER = AlreadyRunning("k", TOKEN).holder
ERRORS: dict[OnlyOneError, type[Exception] | None] = {
    AlreadyRunning("k", TOKEN): None,
    LockLost("k", "deleted", TOKEN): None,
    LockUnavailable("k", "why"): None,
    KeyTemplateError("what to write"): ValueError,
    UnkeyableArgument("what to write"): TypeError,
    ConfigurationError("what to write"): None,
}
"""One of each, and the error of Python that it is, too."""


def assert_same(error: Any, copied: Any) -> None:
    assert type(copied) is type(error)
    assert copied.args == error.args
    assert str(copied) == str(error) != ""
    assert repr(copied) == repr(error) == f"{type(error).__name__}({str(error)!r})"
    for attribute in ("key", "holder", "task_id", "reason"):
        assert hasattr(copied, attribute) == hasattr(error, attribute)
        assert getattr(copied, attribute, None) == getattr(error, attribute, None)


@pytest.mark.parametrize(("error", "also"), ERRORS.items())
def test_an_error_survives_every_trip_and_is_no_other_than_documented(
    error: OnlyOneError, also: type[Exception] | None
) -> None:
    assert type(error).__name__ in package.__all__
    for other in (ValueError, TypeError, RedisError):
        assert isinstance(error, other) == (other is also)
    for protocol in (0, pickle.HIGHEST_PROTOCOL):
        assert_same(error, pickle.loads(pickle.dumps(error, protocol)))  # noqa: S301
    backend = Celery("shop", backend="cache+memory://", set_as_current=False).backend
    stored = json.dumps(backend.prepare_exception(error, "json"))  # type: ignore[no-untyped-call]
    assert_same(error, backend.exception_to_python(json.loads(stored)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("kind", "given", "args", "text"),
    [
        (AlreadyRunning, {}, ("k", ""), "k is taken by a value that is not known"),
        (AlreadyRunning, {"value": "v"}, ("k", "v"), "k is taken by a value that is not a holder of only_one"),
        (AlreadyRunning, {"value": TOKEN}, ("k", TOKEN), "k is taken by {holder}"),
        (LockLost, {"reason": "deleted"}, ("k", "deleted", ""), "k is lost: deleted"),
        (LockLost, {"reason": "r", "value": TOKEN}, ("k", "r", TOKEN), "k is lost: r, now held by {holder}"),
        # A key that was never lost is not called lost.
        (LockLost, {"reason": "released"}, ("k", "released", ""), "k is released: the run has ended"),
        (LockLost, {"reason": "unavailable"}, ("k", "unavailable", ""), "k was never acquired: the server was down"),
        (LockUnavailable, {"problem": "why"}, ("k", "why"), "k could not be acquired: why"),
    ],
)
def test_an_error_says_what_it_knows(kind: Any, given: dict[str, str], args: Any, text: str) -> None:
    error = kind(key="k", **given)
    assert (error.key, error.args, str(error)) == ("k", args, text.format(holder=HOLDER))
    if kind is not LockUnavailable:
        assert error.holder == (HOLDER if TOKEN in args else None)
    if kind is AlreadyRunning:
        of_rq = TOKEN.replace('"attempt"', '"queue":"rq","attempt"')
        assert AlreadyRunning("k", of_rq).task_id is None
        assert error.task_id == ("the-id" if TOKEN in args else None)
