"""Mutants of the safety code, and after how many simulated histories each is seen: ``make simulate-mutants``.

The rule by which the mutants are taken stands here, and nobody chooses among them:

- the safety code is that of ``FILES``;
- each ``if``, ``while`` and conditional expression is taken for true, and for false;
- each part of an ``and`` or ``or`` is left out;
- each call whose result nobody uses, and each assignment to an attribute or an item, is left out;
- each comparison in a Lua text is turned round;
- what only tells (``TOLD``) is no safety code;
- a change that breaks no promise (``EQUIVALENT``) is left out, with the reason;
- they are ordered by the MD5 of file, text of the line and change, and the first are taken: an edit elsewhere in a
  file moves none of them.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = (
    "driver.py",
    "lock/commands.py",
    "lock/pending_releases.py",
    "lock/renewal.py",
    "lock/lease.py",
    "holder.py",
    "lock/token.py",
    "lock/liveness.py",
    "call/locked_call.py",
    "call/owed_key.py",
)
TOLD = re.compile(r"(_explain|log_beside|__str__|look_at_a_new_server|emit|log|debug|warning|exception|info)\(")
"""Functions, and functions that are called, which log or send events, and decide nothing."""

EQUIVALENT = {
    ("if policy is skip:", ""): "whether the first skip is logged",
    ("if server is not None and server.looked_at_from", ""): "whether it is looked whether the server evicts keys",
    ("server.looked_at_from = math.inf", ""): "the same",
    ("if left:", ""): "how long a process that ends waits in vain",
    ("elif due < self.wakes_at:", "'due < self.wakes_at' -> 'True'"): "how often the renewing thread wakes",
    ("lease.renew_at <= moment + lease.ttl / 50", "'lease.renew_at <= moment + lease.ttl / 50' -> 'True'"): "the same",
    ('outcome = "kept"', ""): "whether an event says held or kept",
    ("self.ended.put(None)", ""): "the end of a process with gevent: of real processes only",
    ("self.woken.put(-math.inf)", ""): "the same",
}
"""Changes by a part of their line and of what is told of them, with the reason why no history could show them.

They are those among the first 80; for more mutants, look for more.
"""

FIRST_PART, PART = 20, 250
"""Histories of each world in one process; then the next begins. Half of the mutants are seen in the first."""

WORLDS: list[list[str]] = [[], ["--messages"]]
ENDS_WITHIN = 600
"""Seconds after which a part is taken to hang, which is seen; the unchanged code's takes some 20."""


class Mutant(NamedTuple):
    """A change of one place in one file: by what it is ordered, how it is told, and the file's text with it."""

    order: str
    told: str
    file: str
    text: str


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of one file that the rule gives."""
    text = (ROOT / "only_one" / file).read_text()

    def change(node: ast.AST, new: str, begin: int = 0, end: int | None = None) -> Iterator[Mutant]:
        """Another text for a node, or for a part of its text, if it breaks a promise."""
        place: ast.expr = node  # type: ignore[assignment]
        lines = text.splitlines(keepends=True)
        line = lines[place.lineno - 1].strip()
        at = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
        old = ast.get_source_segment(text, place) or ""
        new = old[:begin] + new + old[len(old) if end is None else end :]
        what = f"{' '.join(old.split())!r} -> {new!r}"
        if not any(part in line and changed in what for part, changed in EQUIVALENT):
            order = md5(f"{file} {line} {what}".encode(), usedforsecurity=False).hexdigest()
            yield Mutant(order, f"{file}:{place.lineno} {what}", file, text[:at] + new + text[at + len(old) :])

    for node in _without_what_tells(ast.parse(text)):
        match node:
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield from change(test, "True")
                yield from change(test, "False")
            case ast.BoolOp(op=op, values=parts):
                for part in parts:
                    yield from change(part, str(isinstance(op, ast.And)))
            case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript(), *_]):
                yield from change(node, "pass")
            case ast.Constant(str(value)) if "redis.call" in value:
                for found in re.finditer("==|<=|>", ast.get_source_segment(text, node) or ""):
                    yield from change(node, {"==": "~=", "<=": ">", ">": "<="}[found[0]], *found.span())


def _without_what_tells(node: ast.AST) -> Iterator[ast.AST]:
    is_looked_at = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Expr))
    if is_looked_at and TOLD.search(ast.unparse(node).partition("\n")[0]):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _without_what_tells(child)


def reds(world: list[str], package: Path, seeds: Iterable[int]) -> set[int]:
    """The seeds whose histories are red; all of them if one does not end in time, or the code cannot run."""
    given = ["--package", str(package), "--jobs", "1", *world, "--seeds", *map(str, seeds)]
    # `timeout` ends its whole group: also the process that plays, or that would go on for ever.
    command = ["timeout", str(ENDS_WITHIN), sys.executable, "-m", "tests.simulation", *given]
    played = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if played.returncode == 0:
        return set()
    found = re.findall(r"^seed (\d+):", played.stdout.replace("\r", "\n"), re.MULTILINE)
    return set(map(int, found)) if played.returncode == 1 and found else set(seeds)


def histories_until_seen(mutant: Mutant, most: int) -> int | None:
    """How many histories of each world it takes until one is red that is not without it; None if none of ``most``."""
    with TemporaryDirectory() as directory:
        shutil.copytree(ROOT / "only_one", Path(directory, "only_one"))
        Path(directory, "only_one", mutant.file).write_text(mutant.text)
        played, size = 0, FIRST_PART
        while played < most:
            for world in WORLDS:
                found = reds(world, Path(directory), range(played, played + size))
                if found and (seen := found - reds(world, ROOT, sorted(found))):
                    return min(seen) + 1
            played, size = played + size, PART
    return None


def main() -> int:
    """Print a line for each mutant, and return whether too few were seen."""
    parser = argparse.ArgumentParser("python -m benchmarks.simulated_mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--mutants", type=int, default=40)
    parser.add_argument("--histories", type=int, default=20_000, help="the most of each world for one mutant")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="only say which they are")
    given = parser.parse_args()
    # Each once: of an f-string, Python's parser gives the whole text for each of its parts.
    every = sorted({each for file in FILES for each in mutants_of(file)})
    taken = every[: given.mutants]
    if given.list:
        print(*(each.told for each in taken), sep="\n")
        return 0
    seen = 0
    with ThreadPoolExecutor(given.jobs) as threads:
        results = threads.map(lambda each: histories_until_seen(each, given.histories), taken)
        for mutant, took in zip(taken, results, strict=True):
            seen += took is not None
            print(f"{took or 'not seen':>8}  {mutant.told}", flush=True)
    print(f"{seen} of {len(taken)} mutants were seen, of {len(every)}")
    return int(seen < 0.9 * len(taken))


if __name__ == "__main__":
    sys.exit(main())
