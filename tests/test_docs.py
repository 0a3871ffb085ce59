"""The pages: the API page names all that is public, other pages name what exists, and sentences are short."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import only_one
from only_one import inspection, testing
from only_one.settings import CONFIGURABLE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

LONGEST_README = 850
LONGEST_SENTENCE = 35


# --- docs/api.md: the site is built from what is declared there, and `make site` refuses what cannot be built ---------

# Of each name that the page declares: the signature that is written there, if any, and the options.
DECLARED = {
    name: (signature, options)
    for name, signature, options in re.findall(
        r"^\.\. auto\w+:: ([\w.]+)(?:\((.*)\))?((?:\n {3}:.*)*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE
    )
}
CURRENT_LOCK = set(re.findall(r"``\.(\w+)", str(only_one.current_lock.__doc__)))


def thing_of(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def public_names() -> Iterator[str]:
    yield from (f"only_one.{name}" for name in only_one.__all__)
    for module in (inspection, testing):
        for node in ast.parse(inspect.getsource(module)).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else map(ast.unparse, targets)
            yield from (f"{module.__name__}.{name}" for name in names if not name.startswith("_"))


def described(thing: Any) -> set[str]:
    """The names in the sections for arguments and attributes of a docstring."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?:(?: .*)?\n?)*)", inspect.getdoc(thing) or "", re.MULTILINE)
    return {name for section in sections for name in re.findall(r"^ {4}\*{0,2}(\w+): ", section, re.MULTILINE)}


def what_it_has(kind: type) -> set[str]:
    """The fields of a class, or the parameters of one that users call; its public properties and methods."""
    made_by: Any = kind.__init__  # type: ignore[misc]
    parameters = list(inspect.signature(made_by).parameters)[1:] if inspect.isfunction(made_by) else []
    shown = [name for name, _ in inspect.getmembers(kind, lambda each: callable(each) or isinstance(each, property))]
    return {name for name in [*getattr(kind, "_fields", parameters), *shown] if is_own(kind, name)}


def is_own(kind: type, name: str) -> bool:
    """Whether a name is public, and not that of a base class of another package."""
    others = [base for base in kind.__mro__ if not base.__module__.startswith("only_one")]
    return name[0] != "_" and not any(name in vars(base) for base in others)


@pytest.mark.parametrize("name", [*public_names()])
def test_each_public_name_is_on_the_page(name: str) -> None:
    assert name in DECLARED
    assert inspect.getdoc(thing_of(name))


@pytest.mark.parametrize("name", [name for name in DECLARED if inspect.isclass(thing_of(name))])
def test_each_field_is_on_the_page(name: str) -> None:
    kind = thing_of(name)
    members = re.findall(r"\w+", DECLARED[name][1].partition(":members:")[2])
    on_page = {thing_of(each) for each in DECLARED}
    found = set(members).union(*(described(base) for base in kind.__mro__ if base in on_page))
    is_lease = name.endswith(".Lease")
    assert (CURRENT_LOCK if is_lease else what_it_has(kind)) <= found
    assert not is_lease or set(members) < CURRENT_LOCK  # which has the key, too


@pytest.mark.parametrize(("name", "signature"), [(name, DECLARED[name][0]) for name in DECLARED if DECLARED[name][0]])
def test_each_parameter_is_on_the_page(name: str, signature: str) -> None:
    """The linter sees that a docstring which describes parameters describes all of them."""
    declared: Any = ast.parse(f"def function({signature}): ...").body[0]
    written = {each.arg for each in declared.args.args + declared.args.kwonlyargs}
    parameters = set(inspect.signature(thing_of(name)).parameters)
    assert written == parameters - {"function_or_key"}
    assert described(thing_of(name)) == parameters


# --- what other pages name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "at_least"),
    [("CONTRIBUTING", 50), ("docs/guarantees", 30), ("docs/how-it-works", 10), ("examples/newsletter/README", 10)],
)
def test_each_file_and_each_test_that_is_named_exists(page: str, at_least: int) -> None:
    # The newsletter's says of which file its tests are.
    text = (ROOT / f"{page}.md").read_text().replace("`test_", "`tests/live/test_newsletter.py::test_")
    named = re.findall(r"`((?:only_one|tests|docs|examples|benchmarks|rigs)/[\w/.-]*)(?:::(\w+))?`", text)
    assert len(named) > at_least
    assert [each for each in named if not is_there(*each)] == []


def is_there(name: str, test: str) -> bool:
    paths = [path for path in (ROOT / name, Path(only_one.__file__).parents[1] / name) if path.exists()]
    return bool(paths) and (not test or f"def {test}(" in paths[0].read_text())


def test_each_setting_is_in_the_table_of_settings() -> None:
    table = (ROOT / "docs" / "where.md").read_text().partition("| `configure` |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == CONFIGURABLE


def test_each_row_of_the_cheat_sheet_can_be_written() -> None:
    page = (ROOT / "docs" / "cheat-sheet.md").read_text()
    *decorators, settings = re.findall(r"^\|[^|]+\| `([^`]+)`", page, re.MULTILINE)
    assert len(decorators) == 11
    for decorator in decorators:
        exec(f"{decorator}\ndef report(shop): ...", vars(only_one).copy())  # noqa: S102 - as a reader of the page does
    with eval(settings, vars(only_one).copy()):  # noqa: S307 - as above
        pass


def test_each_command_of_make_that_is_named_exists() -> None:
    listed = set(re.findall(r"^([\w-]+):.* ## \S", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    assert set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)) <= listed


def test_each_link_of_the_readme_leads_to_a_file_of_the_clone() -> None:
    """Those of the site's pages are seen when it is built."""
    links = re.findall(r"\]\(([^)]*)\)", README)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).is_file()] == []


# --- how long it all is -----------------------------------------------------------------------------------------------

_FENCE = re.compile(r"^ *(`{3,})[^`\n]*\n.*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_UNSEEN = re.compile(r"<!--.*?-->|^\[[\w-]+\]: \S+$", re.MULTILINE | re.DOTALL)
_ROW_OR_HEADING = re.compile(r"^ *[|#].*$", re.MULTILINE)
_CODE = re.compile(r"(`+).*?\1", re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_END_OF_PARAGRAPH = re.compile(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", re.MULTILINE)
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)*_\"]*\s+(?=[^a-z]|only_one)")
_BLANK = "\0"
"""Stands for a blank in code."""


def longest_sentence(text: str) -> tuple[int, str]:
    """The words of the longest sentence in a Markdown text, and the sentence; "" where there is none."""
    prose = _ROW_OR_HEADING.sub("\n", _UNSEEN.sub("", _FENCE.sub("\n", text)))
    prose = _LINK.sub(r"\1", _CODE.sub(lambda code: _BLANK.join(code[0].split()), prose))
    found = [
        (len(sentence.split()), " ".join(sentence.split()).replace(_BLANK, " "))
        for paragraph in _END_OF_PARAGRAPH.split(prose)
        for sentence in _END_OF_SENTENCE.split(paragraph)
    ]
    return max(found, default=(0, ""))


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= LONGEST_README  # as `wc -w` counts


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short(page: Path) -> None:
    words, sentence = longest_sentence(page.read_text())
    assert words <= LONGEST_SENTENCE, sentence


def test_a_sentence_goes_on_in_the_next_line() -> None:
    assert longest_sentence("One two.\nIt goes on\nin the next line. No.") == (7, "It goes on in the next line.")
