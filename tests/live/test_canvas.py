"""What others get when a decorated task in a canvas finds its key busy: the rule of docs/canvas.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from celery import VERSION, chain, chord, group
from celery.exceptions import ChordError

from only_one import AlreadyRunning
from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import PREFIX, Scene, World

other, after = live.other, live.after


def in_a_chain(work: Any) -> Any:
    return chain(other.si(), work, after.s()).delay()


def with_link(work: Any) -> Any:
    """The result of what is linked."""
    task_id = str(uuid4())
    answer = work.apply_async(link=after.s().set(task_id=task_id))
    linked = after.AsyncResult(task_id)
    linked.parent = answer
    return linked


WAITS = {"retry()", "buffer_one()"}
"""With these policies a task waits until its key is free."""

POSITIONS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda work: work.delay(),
    "in a group": lambda work: group(work, other.si()).delay(),
    "in a chain, with others after it": in_a_chain,
    "last in a chain": lambda work: chain(other.si(), work).delay(),
    "in a chord's header": lambda work: chord([work, other.si()], after.s()).delay(),
    "in a group with others after it": lambda work: chain(group(work, other.si()), after.s()).delay(),
    "in a chain in a chord's header, with others after it": lambda work: chord(
        [chain(work, after.s()), other.si()], after.s()
    ).delay(),
    "last in a chain in a chord's header": lambda work: chord([chain(other.si(), work), other.si()], after.s()).delay(),
    "a chord's body": lambda work: chord([other.si(), other.si()], work).delay(),
    "a chord's body, with others after it": lambda work: chain(
        chord([other.si(), other.si()], work), after.s()
    ).delay(),
    "in the header of a chord with others after it": lambda work: chain(
        chord([work, other.si()], after.s()), after.s()
    ).delay(),
    "with `link`": with_link,
    "with `link_error`": lambda work: work.apply_async(link_error=live.hear_of_trouble.s(work.args[0])),
}


@dataclass
class Case:
    """A task in a canvas, and what became of it.

    Attributes:
        position: where it is in the canvas.
        column: its policy.
        scene: its key, which is busy.
        answer: the result of the canvas.
    """

    position: str
    column: str
    scene: Scene
    answer: Any

    def waits(self) -> bool:
        """Whether the task was requeued twice, since the key is taken."""
        return len(self.scene.place.notes("seen", self.scene.key)) >= 2

    def is_over(self) -> bool:
        """Whether the last of the canvas has a result, or will have none, because one before it has failed."""
        return self.answer.ready() or self.error() is not None

    def error(self) -> BaseException | None:
        """What one of the canvas was ended by."""
        node = self.answer
        while node is not None:
            for each in getattr(node, "children", None) or [] if isinstance(node, live.app.GroupResult) else [node]:
                if each.failed():
                    assert isinstance(each.result, BaseException)
                    return each.result
            node = node.parent
        return None

    def cell(self) -> str:
        """What becomes of it, in words."""
        error, key = self.error(), self.scene.key
        failed = self.scene.place.notes("trouble", key)
        if self.position == "with `link_error`":
            return "called" if failed else "not called"
        assert not failed
        if isinstance(error, AlreadyRunning):
            assert error.key == PREFIX + key
            return "`AlreadyRunning`"
        if isinstance(error, ChordError):
            assert "AlreadyRunning" in str(error)
            with pytest.raises(AlreadyRunning):  # of a task of the header, which Celery looks at first
                self.answer.get(timeout=LIMIT)
            return "`ChordError`"
        assert error is None
        value = self.answer.get(timeout=LIMIT)
        if isinstance(value, list):
            value, beside = value
            assert beside == "other"
        known = {None: "`None`", f"result of {key}": "its result", f"instead of {key}": "what it returns"}
        return known[value]


@pytest.fixture(scope="module")
def table(place: World) -> Iterator[dict[str, list[str]]]:
    """What a real worker does, row by row."""
    with place.worker(pool="threads"):
        cases = [begin(place, position, column) for position in POSITIONS for column in live.OF_POLICY]
        for case in cases:
            assert eventually(case.waits if case.column in WAITS else case.is_over), case
            assert case.is_over() != (case.column in WAITS), case
        for case in cases:
            case.scene.free()
        for case in cases:
            assert eventually(case.is_over), case
            # What is called on failure is sent once the failure is stored, and so after it is seen here.
            if case.position == "with `link_error`" and case.error() is not None:
                place.wait_for("trouble", case.scene.key)
        assert eventually(lambda: place.broker.messages() == 0)
        yield {position: [case.cell() for case in cases if case.position == position] for position in POSITIONS}
        assert place.no_key_is_left()


def begin(place: World, position: str, column: str) -> Case:
    """Send a canvas in which a task finds its key busy."""
    scene = Scene(place)
    scene.take()
    work = live.OF_POLICY[column].si(scene.key, f"result of {scene.key}")
    return Case(position, column, scene, POSITIONS[position](work))


def expected(position: str, column: str) -> str:
    """The rule of docs/canvas.md, and its exceptions."""
    if position == "with `link_error`":
        return "called" if column == "fail" else "not called"
    is_in_header = "header" in position or position == "in a group with others after it"
    was_in_header = VERSION < (5, 7) and position == "in the header of a chord with others after it"
    failed = "`ChordError`" if is_in_header and not was_in_header else "`AlreadyRunning`"
    default = failed if is_in_header or "others after it" in position else "`None`"
    given = {"not given": default, "unique": default, "skip": "`None`", "fail": failed, "a callable": "what it returns"}
    return given.get(column, "its result")


@pytest.mark.parametrize("position", POSITIONS)
def test_what_others_receive(table: dict[str, list[str]], position: str) -> None:
    print("|", " | ".join([position, *table[position]]), "|")
    assert table[position] == [expected(position, column) for column in live.OF_POLICY]
