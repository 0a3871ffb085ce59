"""Play histories: ``make simulate``, or one of them again."""

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .history import Histories
from .lock_world import LockWorld
from .message_world import MessageWorld
from .shrinking import shrink, timeline
from .tracing import describe_rare

COUNTED = 51
"""Of so many histories one counts its branches, because it takes three times as long. Odd: of each kind some count."""

_PART = 200
"""So many histories are played in one process, which ends without collecting its garbage: a seventh of the time."""


@cache
def _histories(package: str, *, messages: bool, greets: bool) -> Histories:
    kind, processes = (MessageWorld, 7) if messages else (LockWorld, 4)
    return Histories(kind, processes, Path(package), greets=greets)


def _play(given: tuple[list[int], bool, Any]) -> tuple[int, Counter[Any], list[tuple[str, int, str]]]:
    """Play a part of the histories; return how many, what was met, and the first problem of each that is red."""
    seeds, messages, options = given
    histories = _histories(options.package, messages=messages, greets=options.greets)
    met: Counter[Any] = Counter()
    problems = []
    for seed in seeds:
        history = histories.play(seed, branches=met if seed % COUNTED == 0 else None)
        met.update(history.met)
        problems += [("--messages: " * messages + kind, seed, text) for kind, text in history.problems[:1]]
    return len(seeds), met, problems


def main() -> int:
    package: Any = find_spec("only_one")  # not imported: each process of the worlds has a copy
    parser = argparse.ArgumentParser("python -m tests.simulation", description="Search interleavings of the lock.")
    add = parser.add_argument
    add("--seed", type=int, help="play this history again, shrunk, as a timeline")
    add("--begin", type=int, default=time.time_ns() // 1000, help="the first seed; else the time, so each is fresh")
    add("--histories", type=int, default=10_000, help="how many are played")
    add("--seeds", type=int, nargs="*", help="play these")
    add("--package", default=Path(package.origin).parents[1], help="the folder with another version of only_one")
    add("--messages", action="store_true", help="the world of messages, and not of the lock")
    add("--both", action="store_true", help="of five histories one is in the world of messages")
    add("--greets", action="store_true", help="redis-py tells its name in each, not in one of eight")
    add("--jobs", type=int, default=2)
    given = parser.parse_args()
    return _search(given) if given.seed is None else _again(given)


def _search(given: Any) -> int:
    started, done, met, reds = time.monotonic(), 0, Counter[Any](), Counter[str]()
    seeds: list[int] = given.seeds or list(range(given.begin, given.begin + given.histories))
    slices = [seeds[at : at + _PART] for at in range(0, len(seeds), _PART)]
    parts = [(each, given.messages or (given.both and at % 5 == 4), given) for at, each in enumerate(slices)]
    for messages in {messages for _, messages, _ in parts}:  # now: each part is a fork of this process
        _histories(given.package, messages=messages, greets=given.greets)
    with multiprocessing.get_context("fork").Pool(given.jobs, maxtasksperchild=1) as pool:
        for count, part_met, problems in pool.imap_unordered(_play, parts):
            done += count
            met.update(part_met)
            reds.update(kind for kind, _, _ in problems)
            for kind, seed, text in problems:
                print(f"\rseed {seed}: {kind}: {text}", flush=True)
            rate = done / (time.monotonic() - started)
            print(f"\r{done} of {len(seeds)} histories, {rate:.0f}/s; red: {dict(reds)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    steps = Counter({name: COUNTED * count for name, count in met.items() if not isinstance(name, str)})
    for name, count in sorted(item for item in met.items() if isinstance(item[0], str)):
        print(f"{count:8} {name}")
    print(*describe_rare(Path(given.package, "only_one"), steps, 100), sep="\n")
    return bool(reds)


def _again(given: Any) -> int:
    histories = _histories(given.package, messages=given.messages, greets=given.greets)
    history = histories.play(given.seed)
    if history.problems:
        history = shrink(histories.play, given.seed, history.problems[0][0])
    print(vars(history.plan), timeline(history), f"faults: {' '.join(history.faults)}", sep="\n")
    for kind, text in history.problems:
        print(f"{kind}: {text}")
    return bool(history.problems)


if __name__ == "__main__":
    sys.exit(main())
