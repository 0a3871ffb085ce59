"""A call of a task's function that is no delivery of its message."""

# ruff: noqa: ARG002 - most of what only a delivery would look at

from __future__ import annotations

from typing import Any

from celery import Task

from only_one.holder import Identity
from only_one.plan import Call, Cover, Plan, Policy, TaskRun
from only_one.policies import PutBack, skip
from only_one.protocol import Note, Outcome
from only_one.servers import Server

from .broker import check_countdown
from .wrapping import is_bound


class TaskCall(TaskRun):
    """It has its app's settings, and is else like the call of a plain function.

    Attributes:
        app: the task's app.
    """

    def __init__(self, task: Task) -> None:
        self.app = task.app
        self._task: Any = task  # whose name is None for type checkers

    def default_policy(self) -> Policy:
        """None does no harm here."""
        return skip

    def check(self, plan: Plan) -> None:
        """Refuse countdowns that would make the broker deliver copies.

        Raises:
            ConfigurationError: saying what to write instead.
        """
        for policy in (plan.when_busy, plan.when_down):
            check_countdown(self.app, getattr(policy, "countdown", None))

    def meet(self, server: Server, key: str, value: bytes) -> None:
        """Whoever holds the key is another."""

    def put_back(self, server: Server, key: str, wish: PutBack) -> Any:
        """There is no message to put back.

        Raises:
            OnlyOneError: the error that asked for it.
        """
        raise wish.error

    def may_begin(self, plan: Plan, server: Server, key: str) -> bool:
        """There are no copies of it."""
        return True

    def may_take(self, value: bytes) -> bool:
        """What waits in a queue has not begun."""
        return True

    def stays(self, plan: Plan, ended_by: BaseException | None) -> tuple[bytes, int] | None:
        """Nothing comes after it."""
        return None

    def note(self, key: str, ended_by: BaseException | None) -> Note | None:
        """There are no copies of it."""
        return None

    def told(self, server: Server, key: str, outcome: Outcome | None) -> None:
        """There are no copies of it."""


def call_from_outside(task: Any, cover: Cover) -> Call:
    """The call of a task's function by somebody else than its own run, who gives the arguments without `self`."""
    return Call(task.name, Identity(task.name), cover.task is None and is_bound(task), task.app, TaskCall(task))


def key_from_outside(task: Any, cover: Cover, call: Call, args: Any, kwargs: Any) -> str:
    """The key of such a call, as it is in Redis."""
    given = tuple(args or ())
    return cover.plan_for(call).prefix + cover.make_key(call, (task, *given) if call.bound else given, kwargs or {})
