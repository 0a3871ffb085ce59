"""The key of a queued task that a call has taken over: the call owes it to the task, and stores its value again.

The task may end meanwhile without a run: it is revoked, or it finds its key busy. Then it notes that nothing is owed.
"""

from typing import Any, NamedTuple

from only_one.lock.commands import Commands, Features, now, release
from only_one.lock.holder import is_queued, task_id_of
from only_one.settings import DEFAULT_LEASE


class OwedKey(NamedTuple):
    """The value of a queued task, which is stored again when the call ends.

    Attributes:
        key: the key as it is in Redis.
        value: the value of the queued task.
        until: when the value would have expired, by ``commands.now()``.
    """

    key: str
    value: bytes
    until: float

    def retained(self) -> tuple[bytes, int] | None:
        """The value to store at the key, and its milliseconds; None if no time is left."""
        left = self.until - now()
        if b'"received"' in self.value:  # its worker could not renew it meanwhile, and does so from now on
            left = max(left, DEFAULT_LEASE)
        return (self.value, round(left * 1000)) if left > 0 else None

    def settle(self, features: Features) -> Commands[None]:
        """Release the key, whose value is stored again, if the task has noted meanwhile that it waits no more."""
        if (yield ("GET", _note(self.key, task_id_of(self.value)))) is not None:
            yield from release(features, self.key, self.value)


def owed_to(key: str, value: bytes, token: bytes) -> Commands[OwedKey | None]:
    """The key that is owed if ``token`` takes it over from ``value``; None if that is of no other, queued task."""
    if not is_queued(value) or task_id_of(value) == task_id_of(token):
        return None
    return OwedKey(key, value, now() + (yield ("PTTL", key)) / 1000)


def waive(client: Any, key: str, task_id: str, seconds: float) -> None:
    """Note for ``seconds`` that a task waits for its key no more.

    The task releases its own value after this, and not before: a call stores the value first, and reads this then.
    """
    client.set(_note(key, task_id), 1, px=round(seconds * 1000))


def _note(key: str, task_id: str | None) -> str:
    return f"{{{key}}}:waived:{task_id}"
