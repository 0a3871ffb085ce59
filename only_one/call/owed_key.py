"""The key of a queued task that a call has taken over: the call owes it to the task, and stores its value again.

The task may end meanwhile without a run: it is revoked, or it finds its key busy. Then it notes that nothing is owed.
"""

from typing import Any

from only_one.lock.commands import Commands, Features, Retained, now, release
from only_one.lock.holder import is_queued, task_id_of
from only_one.settings import DEFAULT_LEASE


def owed_to(key: str, value: bytes, token: bytes) -> Commands[Retained | None]:
    """What is owed if ``token`` takes a key over from ``value``; None if that is of no other, queued task."""
    if not is_queued(value) or task_id_of(value) == task_id_of(token):
        return None
    return value, now() + (yield ("PTTL", key)) / 1000


def to_store(owed: Retained) -> Retained:
    """The value to store again, now that the call ends."""
    value, until = owed
    if b'"received"' in value:  # its worker could not renew it meanwhile, and does so from now on
        until = max(until, now() + DEFAULT_LEASE)
    return value, until


def settle(features: Features, key: str, owed: Retained) -> Commands[None]:
    """Release the key, whose value is stored again, if the task has noted meanwhile that it waits no more."""
    if (yield ("GET", _note(key, task_id_of(owed[0])))) is not None:
        yield from release(features, key, owed[0])


def waive(client: Any, key: str, task_id: str, seconds: float) -> None:
    """Note for ``seconds`` that a task waits for its key no more.

    The task releases its own value after this, and not before: a call stores the value first, and reads this then.
    """
    client.set(_note(key, task_id), 1, px=round(seconds * 1000))


def _note(key: str, task_id: str | None) -> str:
    return f"{{{key}}}:waived:{task_id}"
