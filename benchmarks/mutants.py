"""Change one module in small ways, and list the changes that none of its tests notices: ``make mutants``.

    python -m benchmarks.mutants only_one/lock/commands.py [TESTS ...] [--jobs N] [--lua]

mutmut changes the Python code. It does not see Lua: with --lua, `lua_mutants` changes the Lua texts.
`mutants.csv` has the results of each module so far, and the tests that saw them, which run again if none are given.
What a module does for another room needs that room's tests, too: `only_one/call/owed_key.py tests/call tests/celery`.
mutmut runs the tests of a change in a fork of this process, so it cannot see what only other processes run.
A change by which the tests take many times as long is noticed, too.
The module's line of the table is written anew, so ``git diff`` shows what has changed.
`.venv/bin/mutmut show NAME` shows one of mutmut's changes.
"""

from __future__ import annotations

import argparse
import ast
import csv
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("mutants.csv")
SELECTION = ["-m", "not soak and not interrupts and not sees_mutmut"]
NO_TESTS = 33
"""What mutmut writes down where no test runs the changed function."""

WAITS = "20"
"""Seconds after which a test does not wait any longer for what never comes, as a change brings it about."""

LUA_TAKES = 900
"""Seconds after which the tests of a changed Lua text are taken to hang, which is noticed."""


def python_survivors(module: str, tests: list[str], jobs: int) -> tuple[int, list[str]]:
    """How many changes mutmut has made, and the names of those that survive."""
    from mutmut.__main__ import cli  # noqa: PLC0415 - it reads its configuration when it is imported
    from mutmut.configuration import config  # noqa: PLC0415
    from mutmut.mutation.data import SourceFileMutationData  # noqa: PLC0415

    if not Path("mutants", f"{module}.meta").exists():  # mutmut would leave a file alone that it has copied as it is
        shutil.rmtree("mutants", ignore_errors=True)
    config().only_mutate = [module]
    config().pytest_add_cli_args_test_selection = [*SELECTION, *tests]
    cli(["run", "--max-children", str(jobs)], standalone_mode=False)
    data = SourceFileMutationData(path=Path(module))
    data.load()
    codes = {name: code for name, code in data.exit_code_by_key.items() if code is not None}
    return len(codes), [name for name, code in codes.items() if code in (0, NO_TESTS)]


LUA_CHANGES = [
    *[(rf"(?<![~<>=]){old}(?!=)", new) for old, new in (("==", "~="), ("<=", ">"), (">", "<="), ("<", ">="))],
    (r"~=", "=="),
    (r"\band\b", "or"),
    (r"\bor\b", "and"),
    (r"\bnot ", ""),
    (r"(?<= )\+(?= )", "-"),
    (r"(?<= )-(?= )", "+"),
    (r"(?<=\bif ).+(?= then)", "true"),
    (r"(?<=\bif ).+(?= then)", "false"),
    (r"(?<![\w.#\[])\d+(?!\])", "7"),
    (r"(?m)^ *[\w.]+\(.*\)$", ""),
]
"""What is changed in a Lua text: signs, words, conditions, numbers, and calls whose result nobody uses."""


def lua_mutants(source: str) -> dict[str, str]:
    """A module's source with each change of its Lua texts, and how that is told."""
    strings = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    texts = [ast.get_source_segment(source, node) or "" for node in strings]
    mutants = {}
    for text in [each for each in texts if "redis.call(" in each or "ARGV[" in each]:
        begin = source.index(text)
        for pattern, new in LUA_CHANGES:
            for found in re.finditer(pattern, text):
                at, end = begin + found.start(), begin + found.end()
                told = f"line {source.count(chr(10), 0, at) + 1}: {found[0].strip()!r} -> {new!r}"
                mutants[source[:at] + new + source[end:]] = told
    return mutants


def lua_survivors(module: str, tests: list[str]) -> tuple[int, list[str]]:
    """How many changes of Lua texts there are, and those that survive."""
    mutants, survivors = lua_mutants((ROOT / module).read_text()), []
    with TemporaryDirectory() as directory:
        unseen = shutil.ignore_patterns(".*", "mutants", "__pycache__")
        shutil.copytree(ROOT, directory, ignore=unseen, dirs_exist_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", *SELECTION, *tests]
        env = {**os.environ, "PYTHONPATH": directory}
        for source, told in mutants.items():
            Path(directory, module).write_text(source)
            with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired):  # it is noticed
                subprocess.run(command, cwd=directory, env=env, capture_output=True, check=True, timeout=LUA_TAKES)
                survivors.append(told)
            print(told, flush=True)
    return len(mutants), survivors


def main() -> None:
    """Print what survives, and write the module's line of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="a file of the package, such as only_one/lock/renewal.py")
    parser.add_argument("tests", nargs="*", help="files or folders of tests (those of the table)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutmut's processes (one for each core)")
    parser.add_argument("--lua", action="store_true", help="the Lua texts, and not the Python code")
    given = parser.parse_args()
    name = f"{given.module}{' (Lua)' * given.lua}"
    with TABLE.open(newline="") as file:
        head, *rows = csv.reader(file)
    table = {row[0]: row for row in rows}
    tests = given.tests or table.get(name, [""])[-1].split()
    if not tests:
        parser.error(f"{name} is not in the table: which tests?")
    os.environ.setdefault("ONLY_ONE_TEST_LIMIT", WAITS)
    if given.lua:
        number, survivors = lua_survivors(given.module, tests)
    else:
        number, survivors = python_survivors(given.module, tests, given.jobs)
    killed = number - len(survivors)
    percent = 100 * killed / max(number, 1)
    table[name] = [name, f"{killed}", f"{len(survivors)}", f"{percent:.1f}", " ".join(tests)]
    print(*survivors, table[name], sep="\n")
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *sorted(table.values())])


if __name__ == "__main__":
    main()
