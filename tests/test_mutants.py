"""`make mutants` changes Lua texts, which mutmut does not see, and nothing beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

import only_one
from benchmarks import mutants

PACKAGE = Path(only_one.__file__).parent

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


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("[!_]*.py")))
def test_each_module_has_tests(path: Path) -> None:
    assert (mutants.ROOT / mutants.tests_of(path.relative_to(PACKAGE.parent))).exists()
