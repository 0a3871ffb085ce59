"""The decorator ``only_one``, a lock in Redis around a function or a Celery task, and all other public names."""

from .decorator import only_one
from .errors import (
    AlreadyRunning,
    ConfigurationError,
    KeyTemplateError,
    LockLost,
    LockUnavailable,
    OnlyOneError,
    UnkeyableArgument,
)
from .events import Acquired, Busy, Down, Lost, Reclaimed, Released, subscribe
from .lock.lease import current_lock
from .policies import buffer_one, carry_on, fail, retry, skip
from .settings import configure

__all__ = [
    "Acquired",
    "AlreadyRunning",
    "Busy",
    "ConfigurationError",
    "Down",
    "KeyTemplateError",
    "LockLost",
    "LockUnavailable",
    "Lost",
    "OnlyOneError",
    "Reclaimed",
    "Released",
    "UnkeyableArgument",
    "buffer_one",
    "carry_on",
    "configure",
    "current_lock",
    "fail",
    "only_one",
    "retry",
    "skip",
    "subscribe",
]
