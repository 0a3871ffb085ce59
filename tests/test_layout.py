"""The house: imports run downwards only, one room imports Celery, and docs/how-it-works.md shows what is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import only_one

ROOT = Path(only_one.__file__).parent
BESIDE = Path(__file__).parents[1]  # where the package itself may not be: the suite also runs on an installed wheel
PAGE = (BESIDE / "docs" / "how-it-works.md").read_text()

# From the top downwards; a module imports only from those that stand after it.
ORDER = [
    "only_one",
    "only_one.__main__",
    "only_one.inspection",
    "only_one.decorator",
    "only_one.celery.unique_tasks",
    "only_one.celery.async_tasks",
    "only_one.celery.lazy_tasks",
    "only_one.celery.enqueue",
    "only_one.celery.ended_tasks",
    "only_one.celery.received_tasks",
    "only_one.celery.delivery",
    "only_one.celery.redelivery",
    "only_one.celery.coalescing",
    "only_one.celery.app_settings",
    "only_one.celery.requeue",
    "only_one.celery.work",
    "only_one.celery.broker",
    "only_one.call.run",
    "only_one.call.locked_call",
    "only_one.call.owed_key",
    "only_one.call.effective_options",
    "only_one.lock.renewal",
    "only_one.lock.pending_releases",
    "only_one.lock.current_lock",
    "only_one.lock.redis_lock",
    "only_one.lock.commands",
    "only_one.lock.liveness",
    "only_one.lock.token",
    "only_one.settings",
    "only_one.connections.server",
    "only_one.connections.asyncio_client",
    "only_one.connections.cluster",
    "only_one.connections.short_timeouts",
    "only_one.connections.node",
    "only_one.connections.connection_pool",
    "only_one.connections.server_features",
    "only_one.keys",
    "only_one.keys.template",
    "only_one.keys.fields",
    "only_one.keys.digest",
    "only_one.policies",
    "only_one.events",
    "only_one.option_values",
    "only_one.testing",
    "only_one.errors",
    "only_one.holder",
    "only_one.driver",
    "only_one.clock",
    "only_one.connections",
    "only_one.lock",
    "only_one.call",
    "only_one.celery",
]


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("only_one", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports from, in functions and under TYPE_CHECKING too."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - (node.level - 1)] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


MODULES = modules()


def test_every_module_has_its_place_in_the_order() -> None:
    assert sorted(MODULES) == sorted(ORDER)


@pytest.mark.parametrize("name", MODULES)
def test_imports_run_downwards_only(name: str) -> None:
    below = set(ORDER[ORDER.index(name) + 1 :])
    own = {each for each in imports(name, MODULES[name]) if each in MODULES and each != "only_one"}
    assert own <= below


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("only_one.celery")])
def test_only_its_room_imports_celery(name: str) -> None:
    assert not [each for each in imports(name, MODULES[name]) if each.split(".")[0] in ("celery", "kombu", "billiard")]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("only_one.keys")])
def test_keys_know_nothing_of_redis(name: str) -> None:
    assert not [each for each in imports(name, MODULES[name]) if each.split(".")[0] == "redis"]


# docs/how-it-works.md


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


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
