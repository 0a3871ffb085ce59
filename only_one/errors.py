"""The errors of only_one, all with one root.

```
OnlyOneError
├── AlreadyRunning       the key is taken               .key .holder .task_id
├── LockLost             the key was ours, and is not   .key .reason .holder
├── LockUnavailable      the server could not be asked  .key
├── KeyTemplateError     when decorating                also a ValueError
├── UnkeyableArgument    when calling                   also a TypeError
└── ConfigurationError   wrong options or wrong use
```

Each is built from plain strings, so it survives pickle and Celery's JSON, which rebuilds an error from its `args`.
"""

from typing import Any

from .lock.holder import Holder, printable


class HasHolder:
    """An error or event that knows what is stored at the key.

    Attributes:
        value: what is stored there.
    """

    value: Any

    @property
    def holder(self) -> Holder | None:
        """Who holds the key, or held it, as the value says; None where it is not one of ours, or not known."""
        return Holder.parse(self.value)


class OnlyOneError(Exception):
    """The root: whatever only_one raises on its own account is one of these."""


class AlreadyRunning(HasHolder, OnlyOneError):
    """The key is taken, so the call did not run.

    Attributes:
        key: the key as it is in Redis.
        value: what stands in Redis under the key.
    """

    def __init__(self, key: str, value: str = "") -> None:
        super().__init__(key, value)
        self.key = key
        self.value: str = value

    @property
    def task_id(self) -> str | None:
        """The id of the Celery task that holds the key, or None where it is not a task."""
        holder = self.holder
        return holder.task_id if holder else None

    def __str__(self) -> str:
        return f"{printable(self.key)} is taken by {self.holder or 'a value that is not a holder of only_one'}"


class LockLost(HasHolder, OnlyOneError):
    """The run goes on, but its key is no longer ours.

    Attributes:
        key: the key as it is in Redis.
        reason: "overrun" (longer than `timeout`), "expired" (not renewed in time), "taken" (another holds it),
            "deleted" (removed by hand, or by a restart), "unavailable" (never taken, because the server was down).
        value: what stands in Redis under the key instead, where that is known.
    """

    def __init__(self, key: str, reason: str, value: str = "") -> None:
        super().__init__(key, reason, value)
        self.key = key
        self.reason = reason
        self.value: str = value

    def __str__(self) -> str:
        now = f", now held by {self.holder}" if self.holder else ""
        return f"{printable(self.key)} is lost: {self.reason}{now}"


class LockUnavailable(OnlyOneError):
    """The server could not be asked, or refused: whether the key is free is not known.

    The error of redis-py is the `__cause__`.

    Attributes:
        key: the key as it is in Redis.
        problem: what went wrong, in words.
    """

    def __init__(self, key: str, problem: str = "") -> None:
        super().__init__(key, problem)
        self.key = key
        self.problem = problem

    def __str__(self) -> str:
        return f"{printable(self.key)} could not be taken: {self.problem}"


class KeyTemplateError(OnlyOneError, ValueError):
    """A key template that could not work; raised when decorating."""


class UnkeyableArgument(OnlyOneError, TypeError):
    """An argument from which no stable key can be made; raised when calling, before anything is sent."""


class ConfigurationError(OnlyOneError):
    """An option, a setting or a use that could not work."""
