"""`make mutants` changes Lua texts, which mutmut does not see, and nothing beside them."""

from __future__ import annotations

import csv
from pathlib import Path

import only_one
from benchmarks import mutants

SOURCE = """
if 1 < 2: print("no Lua: a == b")
SCRIPT = f'''{BEGIN}
if value == ARGV[1] then
    redis.call('del', KEYS[1])
end
return 1 + copies'''
"""


def test_each_change_is_of_one_place_in_a_lua_text() -> None:
    changes = [
        ("line 4: '==' -> '~='", ("==", "~=")),
        ("line 7: '+' -> '-'", ("+", "-")),
        ("line 4: 'value == ARGV[1]' -> 'true'", ("value == ARGV[1]", "true")),
        ("line 4: 'value == ARGV[1]' -> 'false'", ("value == ARGV[1]", "false")),
        ("line 7: '1' -> '7'", ("1 +", "7 +")),
        ("line 5: \"redis.call('del', KEYS[1])\" -> ''", ("    redis.call('del', KEYS[1])", "")),
    ]
    head, mark, script = SOURCE.partition("{BEGIN}")
    assert list(mutants.lua_mutants(SOURCE)) == [
        (told, head + mark + script.replace(*change)) for told, change in changes
    ]


def test_the_table_names_modules_and_tests_that_exist() -> None:
    with mutants.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    modules = {Path(only_one.__file__).parents[1] / row["module"].removesuffix(" (Lua)") for row in rows}
    tests = {mutants.ROOT / name for row in rows for name in row["tests"].split()}
    assert [each for each in modules | tests if not each.exists()] == []
