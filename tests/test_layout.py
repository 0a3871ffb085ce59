"""docs/how-it-works.md shows what is there; which module may import which is said in pyproject.toml."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import only_one
from tests.documented import tables

ROOT = Path(only_one.__file__).parent
BESIDE = Path(__file__).parents[1]  # where the package itself may not be: the suite also runs on an installed wheel
PAGE = (BESIDE / "docs" / "how-it-works.md").read_text()


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    (table,) = tables(PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0])
    return table[1:]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_map_shows_every_file() -> None:
    shown, room = set(), ""
    for cell, _ in rows_of("The map"):
        if cell.startswith("**"):
            (room,) = named(cell)
        else:
            shown |= {f"{room}{name}" for name in named(cell)}
    files = {f"only_one/{path.relative_to(ROOT)}" for path in ROOT.rglob("*.py")}
    assert shown == {each for each in files if each.count("/") == 1 or not each.endswith("__init__.py")}


@pytest.mark.parametrize(("what", "where"), rows_of("Where do I change what?"))
def test_what_is_to_be_changed_is_where_the_page_says(what: str, where: str) -> None:
    """A file, a folder, or a name in the file before it."""
    assert what
    text = ""
    for name in named(where):
        path = next((each for each in (ROOT / name, BESIDE / name) if each.exists()), None)
        module, _, attribute = name.rpartition(".")
        if path is not None:
            text = path.read_text() if path.is_file() else ""
        elif module:  # of another file, that is named with it
            assert re.search(rf"\b{attribute}\b", (ROOT / f"{module.lower()}.py").read_text()), name
        else:
            assert re.search(rf"\b{name}\b", text), name


def parts(test: ast.AST) -> int:
    """How many conditions are joined by `and` and `or`."""
    test = test.operand if isinstance(test, ast.UnaryOp) else test
    return sum(map(parts, test.values)) if isinstance(test, ast.BoolOp) else 1


def test_a_condition_of_more_than_two_parts_has_a_name() -> None:
    nodes = [(path.name, node) for path in ROOT.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    tests = [(name, node.test) for name, node in nodes if isinstance(node, (ast.If, ast.IfExp, ast.While))]
    assert len(tests) > 100
    assert [f"{name}:{test.lineno}: {ast.unparse(test)}" for name, test in tests if parts(test) > 2] == []


def private_names(tree: ast.AST) -> Iterator[str]:
    """Names of others that begin with an underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            if not isinstance(node.value, ast.Call):  # of `super()`
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("getattr", "__getattribute__"):
            yield from (
                each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("celery", "kombu", "redis"):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def test_every_private_name_of_others_is_listed() -> None:
    used = {name for path in ROOT.rglob("*.py") for name in private_names(ast.parse(path.read_text()))}
    tuples = {"_replace", "_fields", "_asdict"}
    listed = {
        name for cells in rows_of("Private names of others") for each in named(cells[0]) for name in each.split(".")
    }
    assert {name for name in used - tuples if re.match(r"_[a-zA-Z]", name)} == {n for n in listed if n.startswith("_")}
