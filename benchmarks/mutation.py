"""The places of the product that can be changed, and the changes: one mutant is one change of a few characters.

Changed are comparisons, arithmetic, `and`, `or` and `not`, constants, conditions (to True and to False), statements and
decorators (taken out), what is assigned and returned (to None), keyword arguments (taken out), and the Lua scripts.
Left alone are docstrings, annotations and types, imports, stubs of `@overload`, `__all__` and `__slots__`, prose (any
string with a space, any f-string), and messages of the level DEBUG.
"""

from __future__ import annotations

import ast
import hashlib
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "only_one"

MANY = 10
"""Numbers from here on are doubled and halved, smaller ones are one more or halved."""

COMPARISONS: dict[type[ast.cmpop], tuple[str, list[str]]] = {
    ast.Eq: ("==", ["!="]),
    ast.NotEq: ("!=", ["=="]),
    ast.Lt: ("<", ["<=", ">="]),
    ast.LtE: ("<=", ["<", ">"]),
    ast.Gt: (">", [">=", "<="]),
    ast.GtE: (">=", [">", "<"]),
    ast.Is: ("is", ["is not"]),
    ast.IsNot: ("is not", ["is"]),
    ast.In: ("in", ["not in"]),
    ast.NotIn: ("not in", ["in"]),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
    ast.BitXor: ("^", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

DECORATORS_LEFT = {"overload", "dataclass", "abstractmethod"}
TYPE_MAKERS = {"TypeVar", "ParamSpec", "NewType", "cast"}
BUILT_IN_TYPES = {"tuple", "list", "dict", "set", "frozenset", "type"}
PROSE = {"help", "metavar"}
NAMES_LEFT = {"__all__", "__slots__"}
WORD = re.compile(r"(?P<head>[rbRB]*(?P<quote>[\"']))(?P<text>[^\"'\\\s]*)(?P=quote)")

LUA = re.compile(r"redis\.call|KEYS\[")
# What is found in a line of Lua, and what takes its place.
LUA_SWAPS: list[tuple[str, str]] = [
    (r"==", "~="),
    (r"~=", "=="),
    (r"<=", "<"),
    (r">=", ">"),
    (r"(?<= )<(?= )", "<="),
    (r"(?<= )>(?= )", ">="),
    (r"(?<= )and(?= )", "or"),
    (r"(?<= )or(?= )", "and"),
    (r"(?<= )\+(?= )", "-"),
    (r"(?<= )-(?= )", "+"),
    (r"(?<= )\*(?= )", "/"),
    (r" \+ \w+", ""),
    (r"math\.max", "math.min"),
    (r"(?<=if ).+?(?= then)", "true"),
    (r"(?<=if ).+?(?= then)", "false"),
]
LUA_NUMBER = re.compile(r"(?<![\w.%'])\d+(?![\w'])")
LUA_WORD = re.compile(r"(?<!call\()'(?!PX')(\w+:?)'")
LUA_OPENS = re.compile(r"\b(then|do|function)\b")
LUA_ENDS = re.compile(r"\bend\b")
LUA_PARTS = re.compile(r"\s*(local|if|else|elseif|for|end)\b")

Line = tuple[str, int]
Change = tuple[int, int, str]
"""Where it begins and ends, in bytes, and what is put there."""


class Witnesses(NamedTuple):
    """Lines whose execution shows that a mutant was met.

    Attributes:
        near: those that a test has to run to see the change.
        wide: those of the whole function, or module, in case nothing was seen to run the ones that are near.
        by_import: the change itself is run when the module is imported.
    """

    near: frozenset[Line]
    wide: frozenset[Line]
    by_import: bool = False


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: the file, from the root of the project.
        start: where the change begins, in bytes.
        end: where what is replaced ends.
        after: what is put in its place.
        line: the number of the line.
        before_text: the line as it is, without indentation.
        after_text: the line as it becomes.
        witnesses: what a test runs that may notice.
    """

    path: str
    start: int
    end: int
    after: str
    line: int
    before_text: str
    after_text: str
    witnesses: Witnesses

    @property
    def id(self) -> str:
        """A name that stays for as long as the file does."""
        digest = hashlib.sha256(f"{self.start} {self.end} {self.after}".encode()).hexdigest()
        return f"{self.module}:{self.line}:{digest[:5]}"

    @property
    def module(self) -> str:
        """The file, from the package."""
        return self.path.removeprefix(f"{PACKAGE}/")

    def apply(self, source: bytes) -> bytes:
        """The file with the change in it."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def lines_of_functions(source: bytes) -> set[int]:
    """The lines that run when something is called, not when the module is imported."""
    return _lines_of_functions(ast.parse(source))


def is_a_change(mutant: Mutant, source: bytes) -> bool:
    """Whether the mutant is a program, and another than the one it was made from."""
    try:
        changed = ast.parse(mutant.apply(source))
        compile(changed, mutant.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def mutants_of(root: Path) -> list[Mutant]:
    """All mutants of the product below `root`, in the order of files and lines."""
    paths = sorted(path.relative_to(root).as_posix() for path in (root / PACKAGE).rglob("*.py"))
    modules = [_Module(path, (root / path).read_bytes()) for path in paths]
    reads = _Reads(modules)
    found = [mutant for module in modules for mutant in module.mutants(reads)]
    return sorted(
        {(mutant.path, mutant.start, mutant.end, mutant.after): mutant for mutant in found}.values(), key=_order
    )


def _order(mutant: Mutant) -> tuple[str, int, int, str]:
    return mutant.path, mutant.start, mutant.end, mutant.after


def _lines(node: Any) -> range:
    return range(node.lineno, node.end_lineno + 1)


class _Module:
    """One file: where its parts stand, and what can be changed in them."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.called = _lines_of_functions(self.tree)
        self._left_alone = set(self._not_to_be_changed())

    def mutants(self, reads: _Reads) -> Iterator[Mutant]:
        """All mutants of this file."""
        for node in self.nodes():
            for start, end, after in self._changes(node):
                yield self._mutant(node, start, end, after, reads)

    def nodes(self) -> Iterator[Any]:
        """All parts that may be changed."""
        waiting: list[Any] = [self.tree]
        while waiting:
            node = waiting.pop()
            if node not in self._left_alone:
                yield node
                if not isinstance(node, ast.JoinedStr):  # its parts have positions since Python 3.12 only
                    waiting.extend(ast.iter_child_nodes(node))

    def _mutant(self, node: Any, start: int, end: int, after: str, reads: _Reads) -> Mutant:
        first, last = bisect_right(self.starts, start) - 1, bisect_right(self.starts, max(start, end - 1)) - 1
        before_text = self.source[self.starts[first] : self.starts[first + 1]].decode().strip()
        changed = self.source[self.starts[first] : start] + after.encode() + self.source[end : self.starts[last + 1]]
        after_text = " ".join(changed.decode().split())
        witnesses = self._witnesses(node, range(first + 1, last + 2), reads)
        return Mutant(self.path, start, end, after, first + 1, before_text, after_text, witnesses)

    # Which lines a test runs that may notice

    def _witnesses(self, node: Any, lines: Iterable[int], reads: _Reads) -> Witnesses:
        function = self._function_around(node)
        if function is not None:
            body = {line for part in function.body for line in _lines(part)}
            is_run_by_calls = any(each in function.body for each in self._ancestors(node))
            near = {*lines, self._statement(node).lineno} if is_run_by_calls and not isinstance(node, ast.arg) else body
            return Witnesses(self._own(near), self._own(body))
        bound = self._bound_by(node)
        near_lines = reads.of(bound) if bound else frozenset()
        return Witnesses(near_lines or self._own(self._lines_around(node)), self._own(self.called), by_import=True)

    def _own(self, lines: Iterable[int]) -> frozenset[Line]:
        return frozenset((self.path, line) for line in lines)

    def _lines_around(self, node: Any) -> set[int]:
        for each in self._ancestors(node):
            if isinstance(each, ast.ClassDef) and (found := _lines_of_functions(each)):
                return found
        return self.called

    def _ancestors(self, node: Any) -> Iterator[Any]:
        while node is not None:
            yield node
            node = self.parents.get(node)

    def _function_around(self, node: Any) -> Any:
        """The function in which, or in whose decorators and defaults, a part stands."""
        found = [each for each in self._ancestors(node) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return found[0] if found else None

    def _statement(self, node: Any) -> Any:
        return next(each for each in self._ancestors(node) if isinstance(each, ast.stmt))

    def _bound_by(self, node: Any) -> set[str]:
        for each in self._ancestors(node):
            if isinstance(each, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                return _targets(each)
        return set()

    # What is left alone

    def _not_to_be_changed(self) -> Iterator[Any]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg) and node.annotation:
                yield node.annotation
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if node.returns:
                    yield node.returns
                if any(_name(each) == "overload" for each in node.decorator_list):
                    yield node
            elif isinstance(node, ast.ClassDef):
                yield from node.bases
            elif isinstance(node, ast.AnnAssign):
                yield node.annotation
            elif isinstance(node, (ast.Import, ast.ImportFrom)) or _is_no_code(node):
                yield node
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from (each for each in node.body[:1] if _is_docstring(each))

    # What is changed

    def _changes(self, node: Any) -> Iterator[Change]:
        yield from self._of_expression(node)
        yield from self._of_condition(node)
        yield from self._of_statement(node)
        yield from self._of_binding(node)

    def _of_expression(self, node: Any) -> Iterator[Change]:
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and self._is_lua(node):
            yield from self._lua(*self.span(node))
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield self.span(node)[0], self.span(node.operand)[0], ""
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        else:
            yield from self._operators(node)

    def _operators(self, node: Any) -> Iterator[Change]:
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                old, new = COMPARISONS[type(op)]
                yield from self._between(left, right, old, new)
        elif isinstance(node, ast.BoolOp):
            old, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(left, right, old, [other])
        elif isinstance(node, ast.BinOp) and not self._is_format(node) and type(node.op) in ARITHMETIC:
            old, other = ARITHMETIC[type(node.op)]
            yield from self._between(node.left, node.right, old, [other])

    def _of_condition(self, node: Any) -> Iterator[Change]:
        tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
        values = ["False"] if isinstance(node, ast.While) else ["True", "False"]
        for test in tests:
            if test is not None and not isinstance(test, ast.Constant):
                yield from ((*self.span(test), value) for value in values)

    def _constant(self, node: ast.Constant) -> Iterator[Change]:
        start, end = self.span(node)
        value, parent = node.value, self.parents[node]
        if value is True or value is False:
            yield start, end, str(not value)
        elif isinstance(value, (int, float)):
            # One more is a change where it counts something, none where it measures.
            yield start, end, repr(value * 2 if (isinstance(value, float) and value) or value >= MANY else value + 1)
            half = value / 2 if isinstance(value, float) else value // 2
            if half not in (value, 0):
                yield start, end, repr(half)
        elif value is None and isinstance(parent, (ast.arguments, ast.AnnAssign)):
            yield start, end, "0"
        elif isinstance(value, (str, bytes)):
            word = WORD.fullmatch(self.source[start:end].decode())
            if word:
                yield end - 1, end - 1, "X"

    def _call(self, node: ast.Call) -> Iterator[Change]:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            yield *self.span(node.func), NAMES[node.func.id]
        for keyword in node.keywords:
            is_switch = isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, bool)
            if keyword.arg is not None and keyword not in self._left_alone and not is_switch:
                start, end = self.span(keyword)
                comma = re.match(rb"\s*,[ ]*", self.source[end:])
                if not self._is_prose(keyword.value):
                    yield start, end + (comma.end() if comma else 0), ""

    def _of_statement(self, node: Any) -> Iterator[Change]:
        if isinstance(node, ast.Expr):
            is_debug = isinstance(node.value, ast.Call) and _name(node.value) == "debug"
            if not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom)) and not is_debug:
                yield *self.span(node), "pass"
        elif isinstance(node, (ast.Raise, ast.Delete, ast.Break, ast.Continue)):
            yield *self.span(node), "pass"
        elif isinstance(node, ast.Return):
            if node.value is None:
                yield *self.span(node), "pass"
            elif not (isinstance(node.value, ast.Constant) and node.value.value in (None, False)):
                yield *self.span(node.value), "None"

    def _of_binding(self, node: Any) -> Iterator[Change]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for each in node.decorator_list:
                start, end = self.span(each)
                if _name(each) not in DECORATORS_LEFT:
                    yield self.source.rindex(b"@", 0, start), end, ""
        elif isinstance(node, ast.AugAssign):
            yield *self.span(node), "pass"
            old, other = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", [f"{other}="])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            if not isinstance(node.value, ast.Constant) and not self._is_prose(node.value):
                yield *self.span(node.value), "None"
            if self._can_do_without(node):
                yield *self.span(node), "pass"

    def _can_do_without(self, node: Any) -> bool:
        """Whether what is assigned has a value before: without it the change would be noticed by an error at once."""
        function = self._function_around(node)
        if function is None or _targets(node) - self._bound_before(function, node):
            return isinstance(node, ast.Assign) and not any(isinstance(each, ast.Name) for each in node.targets)
        return True

    @staticmethod
    def _bound_before(function: Any, node: Any) -> set[str]:
        before = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
        for each in ast.walk(function):
            if isinstance(each, (ast.Assign, ast.AnnAssign)) and each.lineno < node.lineno:
                before |= _targets(each)
            elif isinstance(each, ast.Global):
                before |= set(each.names)
        return before

    def _is_format(self, node: ast.BinOp) -> bool:
        return isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant)

    def _is_prose(self, node: Any) -> bool:
        start, end = self.span(node)
        return isinstance(node, (ast.Constant, ast.JoinedStr)) and b" " in self.source[start:end]

    # Lua

    def _is_lua(self, node: Any) -> bool:
        start, end = self.span(node)
        return bool(LUA.search(self.source[start:end].decode()))

    def _lua(self, start: int, end: int) -> Iterator[Change]:
        at = start
        lines = self.source[start:end].decode().splitlines(keepends=True)
        for number, line in enumerate(lines):
            is_whole = number > 0 and not line.rstrip().endswith(('"""', "}"))
            for begun, ended, after in _changes_of_lua(line, is_whole=is_whole):
                yield at + len(line[:begun].encode()), at + len(line[:ended].encode()), after
            at += len(line.encode())

    # Where things stand

    def span(self, node: Any) -> tuple[int, int]:
        """Where a part begins and ends, in bytes."""
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _between(self, left: Any, right: Any, old: str, new: Iterable[str]) -> Iterator[Change]:
        start, end = self.span(left)[1], self.span(right)[0]
        found = re.search(rb"\s+".join(re.escape(part.encode()) for part in old.split()), self.source[start:end])
        if found:
            yield from ((start + found.start(), start + found.end(), each) for each in new)


class _Reads:
    """Which lines run that use what a module or a class has bound to a name, on its own account or by another name."""

    def __init__(self, modules: list[_Module]) -> None:
        self._lines: dict[str, set[Line]] = defaultdict(set)
        self._on: dict[str, set[str]] = defaultdict(set)
        for module in modules:
            for node in ast.walk(module.tree):
                name = _read(node)
                if name and getattr(node, "lineno", 0) in module.called:
                    self._lines[name].add((module.path, node.lineno))  # type: ignore[attr-defined]
            for statement in ast.walk(module.tree):
                if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.lineno not in module.called:
                    for node in ast.walk(statement):
                        if name := _read(node):
                            self._on[name] |= _targets(statement) - {name}

    def of(self, names: set[str]) -> frozenset[Line]:
        """The lines that use any of these names."""
        seen: set[str] = set()
        waiting = set(names)
        while waiting:
            name = waiting.pop()
            seen.add(name)
            waiting |= self._on[name] - seen
        return frozenset(line for name in seen for line in self._lines[name])


def _lines_of_functions(tree: ast.AST) -> set[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {line for function in functions for part in function.body for line in _lines(part)}


def _read(node: ast.AST) -> str | None:
    """The name that a part reads, if it does."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def _targets(node: Any) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = [part for target in targets for part in ast.walk(target)]
    return {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}


def _name(node: Any) -> str:
    """What a decorator or a call is called."""
    while isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_no_code(node: Any) -> bool:
    """Whether a part is for type checkers, is prose, or lists names."""
    if isinstance(node, ast.keyword):
        return node.arg in PROSE
    if isinstance(node, ast.If):
        return _name(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return _name(node) in TYPE_MAKERS
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return bool(_targets(node) & NAMES_LEFT) or _is_type(node.value) or _name(node.value) in TYPE_MAKERS
    return isinstance(node, ast.Subscript) and _name(node.value) in ("Literal", "Union", "Callable")


def _is_type(node: Any) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _is_type(node.left) or _is_type(node.right)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id[0].isupper() or node.value.id in BUILT_IN_TYPES
    return False


def _changes_of_lua(line: str, *, is_whole: bool) -> Iterator[Change]:
    """What can be changed in a line of a script.

    Args:
        line: the line, as it stands in the file.
        is_whole: whether nothing of Python's is on it.
    """
    for pattern, new in LUA_SWAPS:
        for found in re.finditer(pattern, line):
            yield *found.span(), new
    for found in LUA_NUMBER.finditer(line):
        number = int(found[0])
        yield *found.span(), str(2 * number if number >= MANY else number + 1)
    for found in LUA_WORD.finditer(line):
        yield found.end() - 1, found.end() - 1, "X"
    is_balanced = len(LUA_OPENS.findall(line)) == len(LUA_ENDS.findall(line))
    if is_whole and line.strip() and is_balanced and not LUA_PARTS.match(line):
        yield len(line) - len(line.lstrip()), len(line.rstrip()), ""
