"""The tables of `make mutants`, a list of each module's tests, and of `make simulate-mutants`."""

from __future__ import annotations

import csv
from pathlib import Path

import only_one
from benchmarks import mutants, simulated_mutants


def test_the_table_names_modules_and_tests_that_exist() -> None:
    with mutants.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    modules = {Path(only_one.__file__).parents[1] / row["module"].removesuffix(" (Lua)") for row in rows}
    tests = {mutants.ROOT / name for row in rows for name in row["tests"].split()}
    assert [each for each in modules | tests if not each.exists()] == []


def test_the_mutants_that_no_history_can_show_are_of_lines_that_exist() -> None:
    code = "".join((Path(only_one.__file__).parent / name).read_text() for name in simulated_mutants.FILES)
    assert [part for part, _ in simulated_mutants.EQUIVALENT if part not in code] == []
