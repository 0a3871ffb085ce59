"""Which tests run which lines of the product, for `benchmarks.mutants`: seen once, and again where files change.

One run of the suite under coverage, in a copy of the project, says it, with the time that each test takes. Tests that
failed there are left out. Where a line of the product changes afterwards, those that ran it run what it has become;
`--afresh` looks at all again.
Those that interrupt run without coverage, which does not survive them, and count as running every line of what they
are about.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Any

from coverage import CoverageData
from coverage.exceptions import CoverageException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.mutants_plugin import CHOICE, CONTEXT, NOTES
from benchmarks.mutants_runner import Runner
from benchmarks.mutation import PACKAGE, Line, Mutant, lines_of_functions

ROOT = Path(__file__).parents[1]
PLACE = ROOT / ".mutants"
MAP = PLACE / "map.json"

INTERRUPTED = {
    f"{PACKAGE}/{name}.py"
    for name in (
        *(
            "call/run",
            "call/locked_call",
            "lock/commands",
            "lock/redis_lock",
            "lock/renewal",
            "lock/current_lock",
            "settings",
        ),
        *("connections/connection_pool", "connections/server"),
    )
}
"""What the tests that interrupt are about, of which nobody can see what they run."""

NOT_NEEDED = ["xdist", "hypothesispytest", "valkey", "platformdirs"]
"""Plugins of pytest's whose import takes longer than most tests, and which no test needs."""

LEAST_SECONDS = 0.02
USUAL_BREADTH = 2000
"""Lines that a test is taken to run of which that cannot be seen."""

MARK = "ONLY_ONE_MUTANTS_BENCH"
"""What the processes of a bench carry in their environment: its folder."""

LONGEST_FILE = 1800.0
MEMORY = 12 * 2**30

# Children of Celery's workers end by signals, or are killed, and write down before what they have run.
SITE = """
import os, sys, threading, time

def write_down():
    import coverage
    while True:
        time.sleep(0.2)
        if (current := coverage.Coverage.current()) is not None:
            current.get_data()

if any("celery" in each for each in sys.orig_argv):
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=write_down, daemon=True).start())
"""

CONFIG = """
[run]
include = {tree}/{package}/*
data_file = {data}/coverage
parallel = true
patch = _exit
context = ${{{context}-}}
"""


@dataclass
class Test:
    """What is known of a test.

    Attributes:
        seconds: how long it took, without the setting up that it shares with others.
        shared: how long that took, for all of its file.
        passed: it did; else it was skipped, or has failed, and nothing can be learnt from it.
        failed: it has.
        interrupts: it raises out of nowhere.
        lines: the lines that it runs, by file.
    """

    seconds: float = 0.0
    shared: float = 0.0
    passed: bool = True
    failed: bool = False
    interrupts: bool = False
    lines: dict[str, list[int]] = field(default_factory=dict)

    @property
    def breadth(self) -> int:
        """How many lines it runs."""
        return sum(map(len, self.lines.values()))


class TestMap:
    """All tests, and who runs a line."""

    def __init__(self, tests: dict[str, Test]) -> None:
        self.tests = {name: test for name, test in tests.items() if test.passed}
        self.failed = sorted(name for name, test in tests.items() if test.failed)
        self._by_line: dict[Line, set[str]] = defaultdict(set)
        for name, test in self.tests.items():
            for path, lines in test.lines.items():
                for line in lines:
                    self._by_line[path, line].add(name)

    def tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that may notice a mutant; those first that cost little for what they can say."""
        near, wide = self._running(mutant.witnesses.near), self._running(mutant.witnesses.wide)
        if near and not mutant.witnesses.by_import:
            wide = set()  # they do not run it
        interrupting = {name for name, test in self.tests.items() if test.interrupts and mutant.path in INTERRUPTED}
        around = mutant.witnesses.near | mutant.witnesses.wide
        first = near | interrupting
        return self._by_cost(first, around) + self._by_cost(wide - first, around)

    def up_to(self, name: str) -> list[str]:
        """A test, and before it what it goes on from: the blocks above it, where it is one of a page."""
        if not file_of(name).endswith(".md"):
            return [name]
        page = [each for each in self.tests if file_of(each) == file_of(name)]
        return page[: page.index(name) + 1]

    def _running(self, lines: Iterable[Line]) -> set[str]:
        return {name for line in lines for name in self._by_line.get(line, ())}

    def _by_cost(self, names: Iterable[str], around: Iterable[Line]) -> list[str]:
        """Tests in order: of those that take the same way through the lines around, each says less than the last."""
        ways: dict[str, frozenset[Line]] = {
            name: frozenset(line for line in around if name in self._by_line.get(line, ())) for name in names
        }
        seen: Counter[frozenset[Line]] = Counter()
        costs: dict[str, float] = {}
        for name in sorted(ways, key=self._costs):
            seen[ways[name]] += 1
            alike = 1 if self.tests[name].interrupts else seen[ways[name]]
            costs[name] = self._costs(name) * math.sqrt(alike)
        return sorted(costs, key=lambda name: costs[name])

    def _costs(self, name: str) -> float:
        # A test of a few lines is about them; one of many lines has them on its way.
        test = self.tests[name]
        breadth = USUAL_BREADTH if test.interrupts else test.breadth
        return (test.seconds + test.shared / 2 + LEAST_SECONDS) * math.sqrt(1 + breadth)


def file_of(test: str) -> str:
    """The file in which a test is."""
    return test.partition("::")[0]


# The project's files, and copies of them


def files() -> list[str]:
    """The project's files, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [each for each in found.splitlines() if (ROOT / each).is_file()]


def copy_to(tree: Path) -> None:
    """Copy the project's files."""
    for each in files():
        (tree / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / each, tree / each)


def digest(paths: Iterable[str]) -> str:
    """What tells one state of some files from another."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(f"{path}\0".encode() + hashlib.sha256((ROOT / path).read_bytes()).digest())
    return found.hexdigest()


def _used_by(path: str, texts: dict[str, str]) -> set[str]:
    """A file, and those that it names, or that they name: imported, or started as a program."""
    helpers = {each: Path(each).stem for each in texts if not _is_test_file(each) and Path(each).stem != "__init__"}
    found, waiting = set(), {path}
    while waiting:
        each = waiting.pop()
        found.add(each)
        names = set(re.findall(r"\w+_\w+|(?<=\.)\w+", texts.get(each, "")))  # or it is a word like another
        waiting |= {helper for helper, stem in helpers.items() if stem in names} - found
    return found


def _is_test_file(path: str) -> bool:
    return Path(path).name.startswith("test_") or path == "README.md" or path.startswith("docs/")


@dataclass
class State:
    """What the files were when the tests were seen.

    Attributes:
        common: a digest of what all tests use.
        product: the text of each file of the product.
        files: a digest of each file of tests, and of those that it uses.
    """

    common: str
    product: dict[str, str]
    files: dict[str, str]

    @classmethod
    def now(cls) -> State:
        """What they are."""
        known = files()
        texts = {path: (ROOT / path).read_text() for path in known if path.startswith(("tests/", "examples/"))}
        common = [path for path in known if Path(path).name == "conftest.py"]
        product = {path: (ROOT / path).read_text() for path in known if path.startswith(f"{PACKAGE}/")}
        tests = [path for path in known if _is_test_file(path)]
        return cls(
            digest([*common, "pyproject.toml"]), product, {path: digest(_used_by(path, texts)) for path in tests}
        )

    @property
    def digest(self) -> str:
        """All of it in a few characters."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


# Running tests


class Ran:
    """What a run of pytest has noted.

    Attributes:
        status: its exit status, None if it was ended because it took too long.
        failed: the tests that failed, in their order.
        passed: those that did not.
        last: the one that was running at the end.
        uncollected: a file could not be read.
    """

    def __init__(self, status: int | None, notes: Path) -> None:
        self.status = status
        self.failed: list[str] = []
        self.passed: set[str] = set()
        self.last: str | None = None
        self.uncollected = False
        self.tests: dict[str, Test] = {}
        self._setups: dict[str, dict[str, float]] = defaultdict(dict)
        if notes.exists():
            for line in notes.read_text().splitlines():
                self._read(json.loads(line))
        self._share_setups()

    def _read(self, said: dict[str, Any]) -> None:
        if "uncollected" in said:
            self.uncollected = True
        elif "test" in said:
            self.last = said["test"]
            self.tests[said["test"]] = Test(interrupts=said["interrupts"])
        else:
            self._read_report(self.tests.setdefault(said["done"], Test()), said)

    def _read_report(self, test: Test, said: dict[str, Any]) -> None:
        name = said["done"]
        test.seconds += said["seconds"]
        if said["when"] == "setup":
            self._setups[file_of(name)][name] = said["seconds"]
        if said["outcome"] != "passed":
            test.passed = False
            test.failed = test.failed or said["outcome"] == "failed"
        if said["outcome"] == "failed" and name not in self.failed:
            self.failed.append(name)
        if said["when"] == "teardown":
            self.last = None
            if test.passed:
                self.passed.add(name)

    def _share_setups(self) -> None:
        for setups in self._setups.values():
            usual = median(setups.values())
            shared = max(setups.values()) - usual
            for name, seconds in setups.items():
                self.tests[name].shared = shared
                self.tests[name].seconds -= max(0.0, seconds - usual)


class Bench:
    """A copy of the project in which tests run, with a place for temporary files of its own."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.temporary = folder / "tree", folder / "t"
        self.log = folder / "log"
        self.folder = folder
        self._runner: Runner | None = None
        self.temporary.mkdir(parents=True)
        copy_to(self.tree)

    def run(self, options: Sequence[str], tests: Sequence[str] = (), *, limit: float, **environment: str) -> Ran:
        """Run tests.

        Args:
            options: for pytest.
            tests: those to run, in their order; all of the files among the options if there are none.
            limit: seconds after which it has taken too long, and is ended.
            environment: what its processes are told besides.
        """
        if _stopped.is_set():
            raise KeyboardInterrupt
        notes, choice = self.folder / "notes", self.folder / "choice"
        notes.unlink(missing_ok=True)
        environment |= {NOTES: str(notes), MARK: str(self.folder)}
        environment = {"PYTHONPATH": str(self.tree), "TMPDIR": str(self.temporary), **environment}
        if tests:
            choice.write_text(json.dumps(tests))
            environment[CHOICE] = str(choice)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ONLY_ONE", "COVERAGE"))}
        # PYTHONPATH: the modules of the copy, wherever a test starts a process.
        without = [f"-pno:{plugin}" for plugin in NOT_NEEDED]
        arguments = ["-q", "-p", "benchmarks.mutants_plugin", *without, "-o", f"cache_dir={PLACE / 'cache'}"]
        arguments += [*options, *dict.fromkeys(map(file_of, tests))]
        environment = {**inherited, **environment}
        start = self._fork if tests and "COVERAGE_PROCESS_START" not in environment else self._execute
        status = start(arguments, environment, limit)
        if _stopped.is_set():
            raise KeyboardInterrupt
        for each in self.temporary.iterdir():
            shutil.rmtree(each, ignore_errors=True)
        return Ran(status, notes)

    def _execute(self, arguments: list[str], environment: dict[str, str], limit: float) -> int | None:
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *arguments], cwd=self.tree, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            with self._running(process.pid):
                return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.wait()

    def _fork(self, arguments: list[str], environment: dict[str, str], limit: float) -> int | None:
        if self._runner is None:
            self._runner = Runner(environment)
        pid = self._runner.start(arguments, self.tree, environment, self.log)
        with self._running(pid):
            status = self._runner.wait(limit)
        if status is None:  # it has been ended now, which is to be heard before the next begins
            self._runner.wait(limit)
        return status

    @contextmanager
    def _running(self, pid: int) -> Iterator[None]:
        _limit_memory(pid)
        _running[pid] = self
        try:
            yield
        finally:
            self.end(pid)
            del _running[pid]

    def end(self, pid: int) -> None:
        """End what is left of a run, whatever sessions its processes have begun: all carry the bench's name."""
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        mark = f"{MARK}={self.folder}".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            process = int(environ.parent.name)
            with suppress(OSError, ProcessLookupError):
                if mark in environ.read_bytes().split(b"\0") and process != (self._runner and self._runner.pid):
                    os.kill(process, signal.SIGKILL)


_running: dict[int, Bench] = {}
_stopped = threading.Event()


@contextmanager
def ending_all() -> Iterator[None]:
    """End all that runs when a `with` block is left by an error, by Ctrl-C or by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except BaseException:
        _stopped.set()
        for pid, bench in list(_running.items()):
            bench.end(pid)
        raise


def _limit_memory(pid: int) -> None:
    with suppress(ImportError, AttributeError, OSError):
        import resource  # noqa: PLC0415 - not everywhere

        resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY, MEMORY))


# Seeing the tests


def as_seen() -> tuple[State, TestMap]:
    """What was seen the last time, even if files have changed since."""
    state, (old, tests) = State.now(), _load()
    _carry(tests, old.product, state.product)
    return state, TestMap(tests)


def look(folder: Path, jobs: int, console: Console, *, afresh: bool = False) -> tuple[State, TestMap]:
    """Which tests run which lines, seen now as far as it has changed, and kept file by file.

    Args:
        folder: an empty one, for copies.
        jobs: how many files of tests run at a time.
        console: where the progress is shown.
        afresh: forget what was seen before.
    """
    state = State.now()
    if afresh:
        MAP.unlink(missing_ok=True)
    old, tests = _load()
    known = old.files if old.common == state.common else {}
    failed = {file_of(name) for name, test in tests.items() if test.failed}
    stale = [path for path, its in state.files.items() if known.get(path) != its or path in failed]
    stale.sort(key=lambda path: path.count("/"))  # those that start workers take longest
    seen = {path: its for path, its in state.files.items() if path not in stale}
    tests = {name: test for name, test in tests.items() if file_of(name) in seen}
    _carry(tests, old.product, state.product)
    benches: SimpleQueue[Bench] = SimpleQueue()
    for number in range(min(jobs, len(stale))):
        benches.put(Bench(folder / f"look-{number}"))

    def see(path: str) -> tuple[str, dict[str, Test]]:
        bench = benches.get()
        try:
            return path, _see(bench, path)
        finally:
            benches.put(bench)

    if stale:
        with bar(console) as progress, ThreadPoolExecutor(jobs) as pool, ending_all():
            task = progress.add_task("what tests run", total=len(stale))
            for done in as_completed([pool.submit(see, path) for path in stale]):
                path, found = done.result()
                tests |= found
                seen[path] = state.files[path]
                _keep(State(state.common, state.product, seen), tests)
                progress.advance(task)
    return state, TestMap(tests)


def bar(console: Console) -> Progress:
    """A progress bar."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    return Progress(*columns, console=console)


def _keep(state: State, tests: dict[str, Test]) -> None:
    PLACE.mkdir(exist_ok=True)
    new = MAP.with_suffix(".new")
    new.write_text(json.dumps({"state": asdict(state), "tests": {name: asdict(test) for name, test in tests.items()}}))
    new.replace(MAP)


def _load() -> tuple[State, dict[str, Test]]:
    if not MAP.exists():
        return State("", {}, {}), {}
    found = json.loads(MAP.read_bytes())
    return State(**found["state"]), {name: Test(**test) for name, test in found["tests"].items()}


def _carry(tests: dict[str, Test], old: dict[str, str], new: dict[str, str]) -> None:
    """Carry over what tests have run where the product has changed since: who ran a line runs what it has become."""
    for path in {path for path, text in old.items() if new.get(path) != text}:
        becomes = _become(old[path].splitlines(), new.get(path, "").splitlines())
        for test in tests.values():
            lines = {after for line in test.lines.pop(path, ()) for after in becomes[line]}
            if lines:
                test.lines[path] = sorted(lines)


def _become(old: list[str], new: list[str]) -> dict[int, set[int]]:
    """Where each line has gone; what is new belongs to the line before it."""
    found: dict[int, set[int]] = defaultdict(set)
    for kind, begin, end, new_begin, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            for line in range(begin, end):
                found[line + 1].add(line + 1 + new_begin - begin)
        else:
            for line in range(begin - 1, end):
                found[line + 1].update(range(new_begin + 1, new_end + 1))
    return found


def _see(bench: Bench, path: str) -> dict[str, Test]:
    """What the tests of a file do."""
    data = bench.folder / "data"
    data.mkdir()
    config = bench.folder / "coveragerc"
    config.write_text(CONFIG.format(tree=bench.tree, package=PACKAGE, data=data, context=CONTEXT))
    site = bench.folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(SITE)
    measured = {"COVERAGE_PROCESS_START": str(config), "COVERAGE_CORE": "ctrace"}
    measured["PYTHONPATH"] = os.pathsep.join(map(str, (bench.tree, site)))
    ran = bench.run(["-m", "not interrupts and not soak", path], limit=LONGEST_FILE, **measured)
    tests = ran.tests
    if ran.failed:  # by chance, or always
        tests |= bench.run([], ran.failed, limit=LONGEST_FILE, **measured).tests
    if "interrupts" in (ROOT / path).read_text():
        tests |= bench.run(["-m", "interrupts", path], limit=LONGEST_FILE).tests
    _read_lines(data, bench.tree, tests)
    shutil.rmtree(data)
    return tests


def _read_lines(data: Path, tree: Path, tests: dict[str, Test]) -> None:
    """Add to the tests of a file the lines of functions that they have run, as the processes have written them down."""
    found: dict[tuple[str, str], set[int]] = defaultdict(set)
    for each in data.iterdir():
        with suppress(CoverageException):  # one that was killed while it wrote
            _read_data(each, tree, tests, found)
    called = {path: lines_of_functions((tree / path).read_bytes()) for _, path in found}
    for (name, path), lines in found.items():
        tests[name].lines[path] = sorted(lines & called[path])


def _read_data(file: Path, tree: Path, tests: dict[str, Test], found: dict[tuple[str, str], set[int]]) -> None:
    measured = CoverageData(str(file))
    measured.read()
    for path in measured.measured_files():
        relative = Path(path).relative_to(tree).as_posix()
        for line, contexts in measured.contexts_by_lineno(path).items():
            for context in contexts:
                # What runs when a file is read, or for a fixture of several tests, runs for all of them.
                for name in [context] if context in tests else tests:
                    found[name, relative].add(line)
