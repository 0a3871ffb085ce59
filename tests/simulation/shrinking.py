"""Shrink a history that is red: leave out the faults and steps that it does not need, and show its timeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .checker import shown


def shrink(play: Callable[[int, frozenset[str]], Any], seed: int, kind: str) -> Any:
    """A history that still has a problem of this kind, without the faults and calls that it does not need."""
    best = play(seed, frozenset())
    size = len(_parts(best)) + 1
    while size := size // 2:
        there = _parts(best)
        for at in range(0, len(there), size):
            history = play(seed, best.left_out.union(there[at : at + size]))
            if any(each == kind for each, _ in history.problems):
                best = history
    return best


def _parts(history: Any) -> list[str]:
    return [each for each in (*history.faults, *history.steps) if each not in history.left_out]


def timeline(history: Any) -> str:
    """The events of a history, a line each, without the commands that only open connections."""
    lines = []
    for seconds, who, what, *details in history.log:
        text = " ".join([what, *map(shown, details)])
        if "CLIENT SETINFO" not in text and "INFO memory" not in text:
            lines.append(f"{round(seconds, 4):9.3f}  {who:10} {text}")
    return "\n".join(lines)
