"""The errors of only_one and their attributes; all have the root ``OnlyOneError``.

::

    OnlyOneError
    ├── AlreadyRunning       the key is busy                .key .value .holder .task_id
    ├── LockLost             the key was ours, and is not   .key .reason .value .holder
    ├── LockUnavailable      the server could not be asked  .key .problem
    ├── KeyTemplateError     when decorating                also a ValueError
    ├── UnkeyableArgument    when calling                   also a TypeError
    └── ConfigurationError   wrong options or wrong use

An error is built from plain strings. So it survives pickle and Celery's JSON, which rebuilds it from its ``args``.
"""

from typing import Any

from .holder import Holder, printable, task_id_of


class HasHolder:
    """An error or event that carries the value stored at the key.

    Attributes:
        value: the value that is stored at the key; a str in ``AlreadyRunning``, ``LockLost`` and
            ``Lost``, bytes in ``Busy`` and ``Reclaimed``.
    """

    value: Any

    @property
    def holder(self) -> Holder | None:
        """The holder that ``value`` names; None if the value is not known, or is not a holder of only_one."""
        return Holder.parse(self.value)


class OnlyOneError(Exception):
    """The root of all errors that only_one raises itself."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class AlreadyRunning(HasHolder, OnlyOneError):
    """The key is busy, so the call did not run.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        value: the value that is stored at the key, a str; empty if it is not known.
        holder: the ``Holder`` that the value names: the call and its process; None if it names
            none.
    """

    def __init__(self, key: str, value: str = "") -> None:
        super().__init__(key, value)
        self.key = key
        self.value: str = value

    @property
    def task_id(self) -> str | None:
        """The id of the Celery task that holds the key, or the id that ``work_id`` returned for the holder.

        None if the holder has neither, or is not known.
        """
        return task_id_of(self.value)

    def __str__(self) -> str:
        unknown = "a value that is not a holder of only_one" if self.value else "a value that is not known"
        return f"{printable(self.key)} is taken by {self.holder or unknown}"


_NEVER_LOST = {
    "released": "is released: the run has ended",
    "unavailable": "was never acquired: the server was down",
}


class LockLost(HasHolder, OnlyOneError):
    """The run has lost its key, so another run with the same key may be under way.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        reason: ``"overrun"`` (the run took longer than ``timeout``), ``"expired"`` (the key was not
            renewed in time), ``"taken"`` (another holder has the key), ``"deleted"`` (the key was
            removed by hand, or by a restart), ``"unavailable"`` (the key was never acquired,
            because the server was down), or ``"released"`` (the run has ended).
        value: the value that is stored at the key now, a str; empty if there is none, or it is not
            known.
        holder: the ``Holder`` that the value names; None if it names none.
    """

    def __init__(self, key: str, reason: str, value: str = "") -> None:
        super().__init__(key, reason, value)
        self.key = key
        self.reason = reason
        self.value: str = value

    def __str__(self) -> str:
        now = f", now held by {self.holder}" if self.holder else ""
        return f"{printable(self.key)} {_NEVER_LOST.get(self.reason, f'is lost: {self.reason}')}{now}"


class LockUnavailable(OnlyOneError):
    """The server could not be asked, or refused: whether the key is free is not known.

    The error of redis-py, or of the system, is the ``__cause__``.

    Attributes:
        key: the key as it is in Redis, with its prefix.
        problem: the type and the text of that error, and the address of the server.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"{printable(self.key)} could not be acquired: {self.problem}"


class KeyTemplateError(OnlyOneError, ValueError):
    """A key template, or a ``key`` or ``work_id`` callable, that cannot work. Also a ValueError.

    It is raised when decorating. Exception: each call raises it if the key can work for a bound task only, and there is
    no such task.
    """


class UnkeyableArgument(OnlyOneError, TypeError):
    """A call whose arguments give no stable key; raised when calling, before any command is sent. Also a TypeError."""


class ConfigurationError(OnlyOneError):
    """An option, a setting or a use that cannot work."""
