"""What the demo has shown: the numbers, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .history import History, Row

COLUMNS = ("ticks", "runs", "skips", "overlaps")


def report(history: History, entries: int) -> str:
    """The summary as text.

    Args:
        history: everything that happened.
        entries: how many feed entries were stored.
    """
    rows = list(history.rows.values())
    return "\n".join([*_table(rows), "", *_notes(history, rows, entries)])


def _table(rows: Iterable[Row]) -> Iterator[str]:
    numbers = [_numbers(row) for row in rows]
    yield _line("", COLUMNS)
    for row, counts in zip(rows, numbers, strict=True):
        yield _line(row.name, counts)
    yield _line("total", [sum(column) for column in zip(*numbers, strict=True)])


def _line(name: str, cells: Iterable[object]) -> str:
    return f"{name:<14}" + "".join(f"{cell!s:>10}" for cell in cells)


def _numbers(row: Row) -> tuple[int, ...]:
    return len(row.ticks), len(row.runs), len(row.skips), len(row.overlaps)


def _notes(history: History, rows: Iterable[Row], entries: int) -> Iterator[str]:
    yield "Overlaps: counted from what each run wrote down itself, not from the lock."
    yield f"Ticks: {'all of them became' if history.adds_up else 'NOT all of them became'} a run or a skip."
    if row := history.killed_row:
        yield f"Killed: {row.name}; {_recovery(row)}."
    yield f"Stored: {entries} feed entries."
    for row in rows:
        if row.trouble:
            yield f"{row.name}: {len(row.trouble)} times the key was lost, or the server not there."


def _recovery(row: Row) -> str:
    killed, again = row.killed, row.next_after_kill
    if not (killed and killed.end and again):
        return "not imported again"
    started = f"started again after {again.start - killed.end:.1f} s"
    return f"{started}, imported again after {again.end - killed.end:.1f} s" if again.end else started


def problem(history: History) -> str | None:
    """Why the demo has failed, in one line; None if it has not.

    Args:
        history: everything that happened.
    """
    rows = history.rows.values()
    killed = history.killed_row
    again = killed.next_after_kill if killed else None
    checks = {
        "two runs overlapped": any(row.overlaps for row in rows),
        "a run failed": any(run.outcome == "failed" for row in rows for run in row.runs),
        "nothing was skipped": not any(row.skips for row in rows),
        "no import was killed in the middle": not killed,
        "the killed feed was not imported again": not (again and again.outcome == "finished"),
    }
    return next((reason for reason, failed in checks.items() if failed), None)
