"""Shrink a history that is red: leave out what it does not need, and show the rest as a timeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .checker import shown

Play = Callable[[int, frozenset[str]], Any]


def shrink(play: Play, seed: int, kind: str) -> frozenset[str]:
    """The faults and calls that a history does not need in order to have a problem of this kind."""
    left_out: frozenset[str] = frozenset()
    there = _parts(play(seed, left_out))
    size = max(1, len(there) // 2)
    while size:
        for part in list(_slices(there, size)):
            trial = left_out.union(part)
            history = play(seed, trial)
            if any(each == kind for each, _ in history.problems):
                left_out = trial
        there = [each for each in _parts(play(seed, left_out)) if each not in left_out]
        size //= 2
    return left_out


def _parts(history: Any) -> list[str]:
    return [*history.faults, *history.steps]


def _slices(parts: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(parts), size):
        yield parts[start : start + size]


def timeline(history: Any) -> str:
    """What has happened, a line each; what only opens connections is left out."""
    lines = []
    for exact, who, what, *details in history.log:
        seconds = round(exact, 4)
        text = " ".join([what, *map(shown, details)])
        if "CLIENT SETINFO" not in text and "INFO memory" not in text:
            lines.append(f"{seconds:9.3f}  {who:10} {text}")
    return "\n".join(lines)
