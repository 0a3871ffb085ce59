"""Does a test notice when the product is changed? Small changes, drawn at random, and the tests that run what changed.

    python -m benchmarks.mutants [--seed N] [--number N] [--module NAME] [--jobs N] [--budget S] [--list] [--only ID]

Which changes there are, `benchmarks.mutation` says.
Each is made in a copy of the project, in which those tests run that run the changed lines (`benchmarks.mutants_map`
has seen which): first some that cost little, then the others, until one fails, or the budget is spent.
A failure counts when the same test fails again by itself, and passes by itself without the change.
A run that takes several times as long as its tests took without the change, and a minute more, is noticed, too.
What changes nothing that matters is named, with the reason, in `equivalents.toml`; it is not run, unless by --only or
--equivalents.
Results are kept in `.mutants`; the same command goes on where it was interrupted, if no file has changed.
With --survivors, what was killed once counts as killed: quick while tests are written, and no proof at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.mutants_map import PLACE, ROOT, Bench, Ran, State, TestMap, as_seen, bar, ending_all, file_of, look
from benchmarks.mutation import Mutant, is_a_change, mutants_of

EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
FIRST_SECONDS = 10.0
FIRST_FILES = 8
"""Of the first tests that run: as much as is soon done."""

TIMES_AS_LONG = 5
AND_SECONDS = 60.0
"""How much longer a run may take than its tests have taken without a change."""

WAITS = "20"
"""Seconds after which a test does not wait any longer for what never comes, as a mutant brings it about."""

TRIES = 3
"""How often a test that has failed is run again, until it fails again."""

NO_TESTS = 5
"""The exit status of pytest where there are none, any more."""

NEEDED = 90
"""Per cent of those that are no equivalents that have to be killed."""

KILLED, SURVIVED, EQUIVALENT = "killed", "survived", "equivalent"


@dataclass
class Result:
    """What has become of a mutant.

    Attributes:
        id: the mutant's.
        fate: killed, survived or equivalent.
        by: the test that failed, or what else has told them apart.
        seconds: how long it took to see.
        run: how many tests were run.
        left: how many would have been, with more time.
        doubted: tests that failed, but not for the change.
    """

    id: str
    fate: str
    by: str = ""
    seconds: float = 0.0
    run: int = 0
    left: int = 0
    doubted: list[str] = field(default_factory=list)


class Equivalents:
    """Mutants that change nothing that matters, each with a reason."""

    def __init__(self, path: Path) -> None:
        self._reasons: dict[tuple[str, str, str], str] = {}
        for each in tomllib.loads(path.read_text()).get("equivalent", []) if path.exists() else []:
            for becomes in each["becomes"]:
                self._reasons[each["module"], each["line"], becomes] = each["reason"]

    def reason(self, mutant: Mutant) -> str | None:
        """Why a mutant changes nothing, if somebody has said so."""
        return self._reasons.get(_text_of(mutant))

    def unmatched(self, mutants: Iterable[Mutant]) -> list[str]:
        """Those that name nothing that there is any more."""
        known = {_text_of(mutant) for mutant in mutants}
        return [f"{module}: {line}  ->  {becomes}" for module, line, becomes in self._reasons.keys() - known]


def _text_of(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.module, mutant.before_text, mutant.after_text


class Trials:
    """Runs tests against mutants, one for each bench at a time."""

    def __init__(self, tests: TestMap, folder: Path, benches: int, budget: float) -> None:
        self._tests, self._budget = tests, budget
        self._sources: dict[str, bytes] = {}
        self._passes: Counter[str] = Counter()
        self._benches: SimpleQueue[Bench] = SimpleQueue()
        for number in range(benches):
            self._benches.put(Bench(folder / str(number)))

    def try_out(self, mutant: Mutant) -> Result:
        """See whether a test notices a mutant."""
        bench = self._benches.get()
        begun = time.monotonic()
        path = bench.tree / mutant.path
        source = self._sources.setdefault(mutant.path, path.read_bytes())
        _write(path, mutant.apply(source))
        try:
            result = self._try_out(mutant, bench)
        finally:
            _write(path, source)
            self._benches.put(bench)
        result.seconds = round(time.monotonic() - begun, 1)
        return result

    def _try_out(self, mutant: Mutant, bench: Bench) -> Result:
        result = Result(mutant.id, SURVIVED)
        chosen = self._tests.tests_for(mutant)
        affordable = list(self._until(chosen, self._budget, len(chosen)))
        result.left = len(chosen) - len(affordable)
        first = list(self._until(affordable, FIRST_SECONDS, FIRST_FILES))
        rest = affordable[len(first) :]
        interrupting = [name for name in rest if self._tests.tests[name].interrupts]
        for batch in (first, _by_file([name for name in rest if name not in interrupting]), interrupting):
            waiting = batch
            while waiting and not result.by:
                waiting = self._run(waiting, bench, mutant, result)
        if result.by:
            result.fate = KILLED
        return result

    def _until(self, names: list[str], seconds: float, most_files: int) -> Iterator[str]:
        """The first of some tests, as many as take so many seconds."""
        seen: set[str] = set()
        for name in names:
            test = self._tests.tests[name]
            shared = test.shared if file_of(name) not in seen else 0.0
            seconds -= test.seconds + shared
            if seen and (seconds < 0 or len(seen | {file_of(name)}) > most_files):
                return
            seen.add(file_of(name))
            yield name

    def _run(self, names: list[str], bench: Bench, mutant: Mutant, result: Result) -> list[str]:
        """Run tests, and note what they say; returns those that are still to be run."""
        ran = self._run_in(bench, names, "-x")
        result.run += len(ran.tests)
        if ran.status in (0, NO_TESTS):
            return []
        guilty = ran.failed[0] if ran.failed else ran.last
        if guilty is None or ran.uncollected:
            return self._blame_pytest(names, ran, bench, mutant, result)
        times = 1 if ran.status is None else self._fails_again(guilty, bench)
        if times and self._passes_unchanged(guilty, times, bench, mutant):
            result.by = guilty + ", which takes too long" * (ran.status is None)
            return []
        result.doubted.append(f"{guilty} ({'fails without it, too' if times else 'passes afterwards'})")
        return [name for name in names if name != guilty and name not in ran.passed]

    def _blame_pytest(self, names: list[str], ran: Ran, bench: Bench, mutant: Mutant, result: Result) -> list[str]:
        """No test has begun, as the mutant lets none; or it is not the mutant's doing."""
        if not self._passes_unchanged(names[0], 1, bench, mutant):
            msg = f"{names[0]} does not run without a change either; pytest says:\n{bench.log.read_text()[-2000:]}"
            raise RuntimeError(msg)
        result.by = f"pytest, which ends with {ran.status}"
        return []

    def _fails_again(self, name: str, bench: Bench) -> int:
        """At which time a test fails again, as one that leaves something to chance may not at once; 0 for at none."""
        for time_ in range(1, TRIES + 1):
            if self._run_in(bench, [name]).status not in (0, NO_TESTS):
                return time_
        return 0

    def _passes_unchanged(self, name: str, times: int, bench: Bench, mutant: Mutant) -> bool:
        """Whether a test passes by itself, as often as it took to fail again, where nothing is changed."""
        times -= self._passes[name]  # as is known from other mutants
        path = bench.tree / mutant.path
        changed = path.read_bytes()
        _write(path, self._sources[mutant.path])
        try:
            for _ in range(times):
                if self._run_in(bench, [name]).status != 0:
                    return False
                self._passes[name] += 1
            return True
        finally:
            _write(path, changed)

    def _run_in(self, bench: Bench, names: list[str], *options: str) -> Ran:
        tests = self._tests.tests
        names = [name for each in names for name in self._tests.up_to(each)]
        shared = {file_of(name): tests[name].shared for name in names}
        limit = TIMES_AS_LONG * (sum(tests[name].seconds for name in names) + sum(shared.values())) + AND_SECONDS
        longest = max(tests[name].seconds + tests[name].shared for name in names)
        for_each = f"{TIMES_AS_LONG * longest + AND_SECONDS / 2:.0f}"
        return bench.run(
            ["--timeout", for_each, *options], list(dict.fromkeys(names)), limit=limit, ONLY_ONE_TEST_LIMIT=WAITS
        )


def _by_file(names: list[str]) -> list[str]:
    """The same tests, those of a file together, so that what they share is set up once."""
    files: dict[str, list[str]] = defaultdict(list)
    for name in names:
        files[file_of(name)].append(name)
    return [name for group in files.values() for name in group]


_stamp = 1_000_000_000


def _write(path: Path, source: bytes) -> None:
    """Write a file with a time of its own, as a compiled file is known by that: a mutant before must not come back."""
    global _stamp  # noqa: PLW0603 - it goes on for as long as the program
    _stamp += 1
    path.write_bytes(source)
    os.utime(path, (_stamp, _stamp))


# What is drawn, and what is known of it


def draw(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """Those to try, in the order in which they are drawn."""
    if options.only:
        found = [mutant for mutant in mutants if any(_is_named(mutant, name) for name in options.only)]
    else:
        found = [mutant for mutant in mutants if options.module in (None, mutant.module)]
        random.Random(options.seed).shuffle(found)
    sources = {path: (ROOT / path).read_bytes() for path in {mutant.path for mutant in found}}
    drawn: list[Mutant] = []
    for mutant in found:
        if len(drawn) < options.number or options.only:
            drawn.extend([mutant] if is_a_change(mutant, sources[mutant.path]) else [])
    return drawn


def _is_named(mutant: Mutant, name: str) -> bool:
    """By its id, or as one of those of a line."""
    return mutant.id == name or mutant.id.startswith(f"{name}:")


class Kept:
    """The results so far, in a file, for the next time."""

    def __init__(self, path: Path, state: State, *, only_killed: bool) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        is_same = bool(lines) and json.loads(lines[0]) == state.digest
        fates = {KILLED} if only_killed else {KILLED, SURVIVED} if is_same else set()
        found = [Result(**json.loads(line)) for line in lines[1:]]
        path.write_text(json.dumps(state.digest) + "\n")
        self.results: dict[str, Result] = {}
        for result in found:
            if result.fate in fates:
                self.add(result)

    def add(self, result: Result) -> None:
        """Keep one more."""
        self.results[result.id] = result
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")


# The report


def summary(drawn: list[Mutant], results: dict[str, Result]) -> tuple[Table, float]:
    """How many of each module have become what, and the per cent killed of those that are no equivalents."""
    fates = (KILLED, SURVIVED, EQUIVALENT)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in drawn:
        if mutant.id in results:
            counts[mutant.module][results[mutant.id].fate] += 1
    table = Table("module", *fates)
    for module, count in sorted(counts.items()):
        table.add_row(module, *(str(count[fate] or "") for fate in fates))
    total = sum(counts.values(), Counter[str]())
    table.add_section()
    table.add_row("all", *(str(total[fate]) for fate in fates))
    real = total[KILLED] + total[SURVIVED]
    return table, 100 * total[KILLED] / real if real else 100.0


def told(mutant: Mutant, result: Result, reason: str | None) -> str:
    """A mutant as a small difference, and what is to be said of it."""
    text = f"{mutant.id}\n  - {mutant.before_text}\n  + {mutant.after_text}"
    if reason:
        text += f"\n  equivalent: {reason}"
    if result.fate == SURVIVED:
        text += f"\n  {result.run} tests ran" + (f", {result.left} would have taken too long" if result.left else "")
    if result.doubted:
        text += f"\n  failed, but not for the change: {', '.join(result.doubted)}"
    return text


def report(
    drawn: list[Mutant], results: dict[str, Result], equivalents: Equivalents, title: str
) -> tuple[str, Any, float]:
    """All that is to be said: the list, the table, and the per cent killed."""
    parts = [title]
    for fate in (SURVIVED, EQUIVALENT):
        those = sorted((each for each in drawn if each.id in results and results[each.id].fate == fate), key=_place)
        parts += [f"\n{fate}: {len(those)}"] if those else []
        parts += [told(mutant, results[mutant.id], equivalents.reason(mutant)) for mutant in those]
    claimed = [each for each in drawn if equivalents.reason(each) and results.get(each.id, None_).fate == KILLED]
    parts += [
        f"\n{each.id} is said to be equivalent, and {results[each.id].by} tells the two apart" for each in claimed
    ]
    table, per_cent = summary(drawn, results)
    return "\n".join(parts), table, per_cent


None_ = Result("", "")


def _place(mutant: Mutant) -> tuple[str, int]:
    return mutant.path, mutant.line


def main() -> None:
    """Draw, run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the mutants that are drawn")
    parser.add_argument("--number", type=int, default=200, help="of mutants (200)")
    parser.add_argument("--module", help="draw from this file of the package only, such as celery/requeue.py")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at a time (2)")
    parser.add_argument("--budget", type=float, default=240, help="seconds of tests for each (240)")
    parser.add_argument(
        "--as-seen", action="store_true", help="choose tests by what was seen before, files changed or not"
    )
    parser.add_argument("--afresh", action="store_true", help="look anew which lines all the tests run")
    parser.add_argument("--list", action="store_true", help="print what is drawn, and run nothing")
    parser.add_argument("--survivors", action="store_true", help="of the last run of this seed, those that survived")
    parser.add_argument(
        "--only", action="append", metavar="ID", help="this mutant, or all of a line (connections/server.py:88)"
    )
    parser.add_argument("--equivalents", action="store_true", help="run those that are said to be equivalent, too")
    options = parser.parse_args()
    console = Console(soft_wrap=True, highlight=False)
    mutants = mutants_of(ROOT)
    drawn = draw(mutants, options)
    title = f"seed {options.seed}, {len(drawn)} of {len(mutants)} mutants" + f" of {options.module}" * bool(
        options.module
    )
    if options.list:
        console.print(escape("\n".join([title, *(told(each, None_, None) for each in drawn)])))
        return
    equivalents = Equivalents(EQUIVALENTS)
    for each in equivalents.unmatched(mutants):
        console.print(f"equivalents.toml names what is no more: {escape(each)}")
    sys.exit(run(console, drawn, equivalents, options, title))


def run(
    console: Console, drawn: list[Mutant], equivalents: Equivalents, options: argparse.Namespace, title: str
) -> int:
    """Try the mutants out and report; returns the exit status."""
    PLACE.mkdir(exist_ok=True)
    name = "only" if options.only else f"seed-{options.seed}-{options.number}"
    name += f"-{options.module.replace('/', '-')}" if options.module else ""
    with tempfile.TemporaryDirectory(prefix="mut-", ignore_cleanup_errors=True) as folder:
        state, tests = (
            as_seen() if options.as_seen else look(Path(folder), options.jobs, console, afresh=options.afresh)
        )
        for test in tests.failed:
            console.print(f"left out, as it does not pass: {escape(test)}")
        kept = Kept(PLACE / f"{name}.jsonl", state, only_killed=options.survivors)
        if options.only:
            kept.results.clear()
        runs = options.equivalents or options.only
        for mutant in drawn:
            if not runs and equivalents.reason(mutant):
                kept.results[mutant.id] = Result(mutant.id, EQUIVALENT)
        waiting = [mutant for mutant in drawn if mutant.id not in kept.results]
        trials = Trials(tests, Path(folder), options.jobs, options.budget)
        with bar(console) as progress, ThreadPoolExecutor(options.jobs) as pool, ending_all():
            task = progress.add_task("mutants", total=len(drawn), completed=len(drawn) - len(waiting))
            known = {mutant.id: mutant for mutant in drawn}
            running = [pool.submit(trials.try_out, mutant) for mutant in waiting]
            for done in as_completed(running):
                result = done.result()
                if result.fate == SURVIVED and equivalents.reason(known[result.id]):
                    result.fate = EQUIVALENT
                kept.add(result)
                if result.fate == SURVIVED or options.only:
                    text = told(known[result.id], result, None)
                    progress.console.print(escape(f"{result.fate} {result.by}: {text}"))
                progress.advance(task)
    text, table, per_cent = report(drawn, kept.results, equivalents, title)
    console.print(escape(text), table, sep="\n")
    console.print(f"killed: {per_cent:.1f} % of those that are no equivalents ({title})")
    with (PLACE / f"{name}.md").open("w") as file:
        Console(file=file, width=120).print(escape(text), table, f"killed: {per_cent:.1f} %", sep="\n")
    return 0 if per_cent >= NEEDED else 1


if __name__ == "__main__":
    main()
