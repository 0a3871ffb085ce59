"""The table of `make mutants`, which docs/how-it-works.md calls the list of a module's tests."""

from __future__ import annotations

import csv
from pathlib import Path

import only_one
from benchmarks import mutants


def test_the_table_names_modules_and_tests_that_exist() -> None:
    with mutants.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    modules = {Path(only_one.__file__).parents[1] / row["module"].removesuffix(" (Lua)") for row in rows}
    tests = {mutants.ROOT / name for row in rows for name in row["tests"].split()}
    assert [each for each in modules | tests if not each.exists()] == []
