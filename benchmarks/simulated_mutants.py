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
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import md5
from pathlib import Path
from subprocess import DEVNULL, PIPE
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
TOLD = {"_explain", "log_beside", "__str__", "look_at_a_new_server", "emit"}
TOLD |= {"log", "debug", "warning", "exception", "info"}  # of a logger
"""Functions, and functions that are called, which log or send events, and decide nothing."""

EQUIVALENT = {
    ("while True:", "'True' -> 'True'"): "the same text",
    ('"".encode("idna")', ""): "a child that is forked while Python imports: of real processes only",
    ("if policy is skip:", ""): "whether the first skip is logged",
    ("if lease.trouble is not None and", ""): "whether a failed renewal is logged",
    ("if server is not None and server.looked_at_from", ""): "whether it is looked whether the server evicts keys",
    ("server.looked_at_from = math.inf", ""): "the same",
    ("_renewer.not_looked_at[server] = lease.key", ""): "the same",
    ("each.isprintable()", ""): "how a text is shown",
    ("if node.backs_off_until > now():", "False"): "how soon a server that is away is asked again",
    ("while left and now() < limit:", "'left' -> 'True'"): "how long a process that ends waits in vain",
    ("if left:", ""): "the same",
    ("time.sleep(_FIRST_PAUSE)", ""): "the same",
    ("self.renew_at = sent + ttl / 3", "'self.renews' -> 'True'"): "the other part says the same",
    ("_LONGEST_REMEMBERED", ""): "memory",
    ("self.ended_by = None", ""): "memory",
    ("elif due < self.wakes_at:", "'due < self.wakes_at' -> 'True'"): "how often the renewing thread wakes",
    ("lease.renew_at <= moment + lease.ttl / 50", "'lease.renew_at <= moment + lease.ttl / 50' -> 'True'"): "the same",
    ("if self._retained and must_store:", "'self._retained' -> 'True'"): "whether an event says gone or unknown",
    ('outcome = "kept"', ""): "whether an event says held or kept",
    ("self.ended.put(None)", ""): "the end of a process with gevent: of real processes only",
    ("self.woken.put(-math.inf)", ""): "the same",
    ("self.wakes_at = due = min(due, self.next_due())", ""): "a thread that stops between two lines",
    ("lease.asked_at if _renewer.not_looked_at", "-> 'True'"): "how often the renewing thread wakes",
}
"""Changes by a part of their line and of what is told of them, with the reason why no history could show them.

They were looked for among the first 80 before any of these was played; the last was found by playing them.
"""

PART = 250
"""Histories of each world in one process; then the next begins."""

WORLDS: list[list[str]] = [[], ["--messages"]]
SLOWER = 10
"""A part may take so many times as long as that of the unchanged code; else a history does not end, which is seen."""


class Mutant(NamedTuple):
    """A change of one place in one file: its line, the text of that line, the change, and the file's text with it."""

    file: str
    number: int
    line: str
    change: str
    text: str

    @property
    def told(self) -> str:
        """How it is told."""
        return f"{self.file}:{self.number} {self.change}"

    @property
    def place(self) -> str:
        """By what it is ordered."""
        digest = md5(f"{self.file} {self.line.strip()} {self.change}".encode(), usedforsecurity=False)
        return digest.hexdigest()

    @property
    def is_equivalent(self) -> bool:
        """Whether it breaks no promise."""
        return any(line in self.line and change in self.change for line, change in EQUIVALENT)


def mutants_of(file: str) -> Iterator[Mutant]:
    """All mutants of one file that the rule gives."""
    text = (ROOT / "only_one" / file).read_text()

    def change(node: ast.AST, new: str, begin: int = 0, end: int | None = None) -> Mutant:
        """Another text for a node, or for a part of its text."""
        place: ast.expr = node  # type: ignore[assignment]
        lines = text.splitlines(keepends=True)
        at = sum(map(len, lines[: place.lineno - 1])) + place.col_offset
        old = ast.get_source_segment(text, place) or ""
        new = old[:begin] + new + old[len(old) if end is None else end :]
        told = f"{' '.join(old.split())!r} -> {new!r}"
        return Mutant(file, place.lineno, lines[place.lineno - 1], told, text[:at] + new + text[at + len(old) :])

    for node in _without_what_tells(ast.parse(text)):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield change(node.test, "True")
            yield change(node.test, "False")
        elif isinstance(node, ast.BoolOp):
            for part in node.values:
                yield change(part, str(isinstance(node.op, ast.And)))
        elif _is_left_out(node):
            yield change(node, "pass")
        elif isinstance(node, ast.Constant) and "redis.call" in str(node.value):
            for found in re.finditer("==|<=|>", ast.get_source_segment(text, node) or ""):
                yield change(node, {"==": "~=", "<=": ">", ">": "<="}[found[0]], *found.span())


def _without_what_tells(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in TOLD:
        return
    if isinstance(node, (ast.If, ast.Expr)) and any(
        f"{name}(" in ast.unparse(node).partition("\n")[0] for name in TOLD
    ):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _without_what_tells(child)


def _is_left_out(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    is_kept = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    return is_kept or isinstance(node, ast.AugAssign)


def reds(world: list[str], package: Path, seeds: Iterable[int], limit: float | None = None) -> set[int]:
    """The seeds whose histories are red; all of them if one does not end in time, or the code cannot run."""
    given = ["--package", str(package), "--jobs", "1", *world, "--seeds", *map(str, seeds)]
    command = [sys.executable, "-m", "tests.simulation", *given]
    with subprocess.Popen(command, cwd=ROOT, stdout=PIPE, stderr=DEVNULL, text=True, start_new_session=True) as playing:
        try:
            output, _ = playing.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(playing.pid, signal.SIGKILL)  # also the process that plays, or it would go on for ever
            return set(seeds)
    if not playing.returncode:
        return set()
    found = re.findall(r"^seed (\d+):", output.replace("\r", "\n"), re.MULTILINE)
    return set(map(int, found)) or set(seeds)


def longest() -> float:
    """The seconds within which a part of either world has to end."""
    begun = time.monotonic()
    for world in WORLDS:
        if found := reds(world, ROOT, range(PART)):
            msg = f"histories {sorted(found)} are red without a mutant: mend that first"
            raise SystemExit(msg)
    return SLOWER * (time.monotonic() - begun)


def histories_until_seen(mutant: Mutant, most: int, limit: float) -> int | None:
    """How many histories of each world it takes until one is red that is not without it; None if none of ``most``."""
    with TemporaryDirectory() as directory:
        shutil.copytree(ROOT / "only_one", Path(directory, "only_one"))
        Path(directory, "only_one", mutant.file).write_text(mutant.text)
        for begin in range(0, most, PART):
            for world in WORLDS:
                found = reds(world, Path(directory), range(begin, begin + PART), limit)
                if found and (seen := found - reds(world, ROOT, sorted(found))):
                    return min(seen) + 1
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
    every = dict.fromkeys(each for file in FILES for each in mutants_of(file) if not each.is_equivalent)
    taken = sorted(every, key=lambda each: each.place)[: given.mutants]
    if given.list:
        print(*(each.told for each in taken), sep="\n")
        return 0
    seen, limit = 0, longest()
    with ThreadPoolExecutor(given.jobs) as threads:
        results = threads.map(lambda each: histories_until_seen(each, given.histories, limit), taken)
        for mutant, took in zip(taken, results, strict=True):
            seen += took is not None
            print(f"{took or 'not seen':>8}  {mutant.told}", flush=True)
    print(f"{seen} of {len(taken)} mutants were seen, of {len(every)}")
    return int(seen < 0.9 * len(taken))


if __name__ == "__main__":
    sys.exit(main())
