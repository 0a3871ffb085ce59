"""What monitoring agents make of a task; it imports nothing of ours, so the simulated worlds have it, too."""

from __future__ import annotations

from typing import Any


class Wrapped:
    """A task as New Relic's agent has Celery run it: an object that is no task, and has what its task has."""

    def __init__(self, task: Any) -> None:
        self.__wrapped__ = task

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__.run(*args, **kwargs)
