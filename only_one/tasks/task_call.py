"""A call of a task's function that is no delivery of its message."""

from __future__ import annotations

from typing import Any

from celery import Task

from only_one.holder import Identity
from only_one.plan import Call, Cover, Plan

from .broker import check_countdown
from .wrapping import is_bound


class TaskCall(Call):
    """It has its app's settings, and is else like the call of a plain function."""

    def __init__(self, task: Task, identity: Identity | None = None, *, bound: bool = False) -> None:
        self._task: Any = task  # whose name is None for type checkers
        super().__init__(self._task.name, identity or Identity(self._task.name), bound=bound)
        self.app = task.app

    def check(self, plan: Plan) -> None:
        """Refuse countdowns that would make the broker deliver copies.

        Raises:
            ConfigurationError: saying what to write instead.
        """
        for policy in (plan.when_busy, plan.when_down):
            check_countdown(self.app, getattr(policy, "countdown", None))


def call_from_outside(task: Any, cover: Cover) -> Call:
    """The call of a task's function by somebody else than its own run, who gives the arguments without `self`."""
    return TaskCall(task, bound=cover.task is None and is_bound(task))


def key_from_outside(task: Any, cover: Cover, call: Call, args: Any, kwargs: Any) -> str:
    """The key of such a call, as it is in Redis."""
    given = tuple(args or ())
    return cover.plan_for(call).prefix + cover.make_key(call, (task, *given) if call.bound else given, kwargs or {})
