"""Which holders are dead: real processes that live, stop, die and belong to others."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from only_one.clock import now
from only_one.holder import Holder, is_queued, printable, task_id_of, work_held_by
from only_one.lock import liveness, token
from only_one.lock.liveness import is_dead, is_gone
from only_one.lock.token import TokenFactory, active_tokens, kept, process_start, words_of
from rigs.namespaces import MACHINE, unshare
from rigs.waiting import LIMIT
from tests.decorated import token_of_the_dead
from tests.faults.programs import Program

ACQUIRES = """
import signal
from only_one.lock.token import TokenFactory
print(TokenFactory("work").token(600).decode(), flush=True)
signal.pause()
"""

CONTAINER = unshare(*MACHINE)
FOREIGN_PROC = unshare("--pid", "--uts")
HIDDEN_PROC = unshare("--mount")

in_container = pytest.mark.skipif(CONTAINER is None, reason="no pid namespace can be made here")


class Acquirer(Program):
    """A process that has made a token, and lives until it is ended.

    Attributes:
        value: the token.
    """

    def __init__(self) -> None:
        super().__init__(ACQUIRES)
        self.value = self.line().encode()


def said(program: str, inside: Sequence[str] | None = (), before: str = "") -> list[str]:
    """The words that a program prints.

    Args:
        program: the program in Python.
        inside: a command that starts it, such as `unshare`.
        before: what the shell does there before it.
    """
    assert inside is not None
    python = [sys.executable, "-W", "ignore", "-c", program]
    command = ["sh", "-c", f'{before} exec "$@"', "sh", *python] if before else python
    return subprocess.run([*inside, *command], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def process() -> Iterator[Acquirer]:
    with Acquirer() as process:
        yield process


DEAD = token_of_the_dead()
parse: Any = Holder.parse


def changed(value: bytes, **changes: object) -> bytes:
    """A token with other things in it, serialized as tokens are."""
    return json.dumps({**json.loads(value), **changes}, separators=(",", ":")).encode()


# Tokens


def test_clones_of_a_process_do_not_spell_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual machine that is cloned: what it draws at random it has drawn, and all its clones count alike."""
    identity, moment = TokenFactory("work"), time.time_ns()
    tokens = []
    for microseconds in (1, 2):
        monkeypatch.setattr(token.this_process(), "numbers", itertools.count(7))
        monkeypatch.setattr(time, "time_ns", lambda later=microseconds: moment // 10**6 * 10**6 + later * 1000)
        tokens.append(identity.token(600))
    assert tokens[0] != tokens[1]
    ours, theirs = map(parse, tokens)
    assert ours.id != theirs.id
    assert ours.since == theirs.since


def test_what_the_tokens_of_a_function_have_in_common_is_serialized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for another limit."""
    identity = TokenFactory("work")
    first = identity.token(60)
    monkeypatch.setattr(token.this_process(), "serialized", None)
    second = identity.token(60)
    monkeypatch.undo()
    limits = [json.loads(token)["limit"] for token in (first, second, identity.token(30), identity.token(None))]
    assert limits == [60_000, 60_000, 30_000, None]
    assert len(bytes.fromhex(json.loads(first)["process"])) == 8  # so that no two processes ever draw the same
    before = identity.token(60)
    monkeypatch.setattr(token, "_made", {})  # as in a forked child
    assert json.loads(identity.token(60))["process"] != json.loads(before)["process"]
    assert json.loads(identity.token(60))["process_start"] == process_start(os.getpid())
    assert before.startswith(token.this_process().machine_mark)


def test_a_holder_is_shown_and_not_changed() -> None:
    with_task, without = (Holder.parse(TokenFactory("a\nb", task_id).token(60)) for task_id in ("the-id", None))
    assert str(with_task) == f"a\\nb (task the-id), pid {os.getpid()} on {socket.gethostname()}"
    assert str(without) == f"a\\nb, pid {os.getpid()} on {socket.gethostname()}"
    assert printable("a\x1b[2J\r") == "a\\x1b[2J\\r"
    assert printable("\xe9\\ '") == "\xe9\\ '"
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_task.state = "kept"  # type: ignore[misc, union-attr]


def test_a_value_of_a_later_version_is_read() -> None:
    """Unknown fields are ignored; a field that the first version did not have may be missing."""
    later = changed(DEAD, more="of it")
    assert Holder.parse(later) == Holder.parse(DEAD)
    assert is_dead(later)
    assert parse(TokenFactory("work", "the-id", 0, replacement=2).token(60)).replacement == 2
    of_job = parse(TokenFactory("work", "the-id", 0, queue="rq").token(60))
    assert of_job.queue == "rq"
    of_work_id = parse(TokenFactory("work", "the-id").token(60))
    assert (work_held_by(of_job), work_held_by(of_work_id)) == (None, None)
    assert words_of("the-id", 2, 0) in TokenFactory("work", "the-id", 0, replacement=2).token(60)
    assert b"replacement" not in TokenFactory("work", "the-id", 0).token(60), "the first version refuses it"


# Processes


def test_a_process_is_alive_until_nothing_is_left_of_it(process: Acquirer) -> None:
    """Stopped, and as a zombie that nobody has waited for, too; and where its start is not known."""
    values = [process.value, changed(process.value, process_start=None)]
    assert not any(map(is_dead, values))
    assert not is_gone(process.value)
    os.kill(process.pid, signal.SIGSTOP)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not any(map(is_dead, values))
    process.process.kill()
    assert os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not any(map(is_dead, values))
    process.process.wait()
    assert all(map(is_dead, values * 2))
    assert is_gone(process.value)


def test_two_threads_that_make_the_first_tokens_are_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one of two calls of a job would take the other for that of another process."""
    both_are_there = threading.Barrier(2, timeout=LIMIT)
    monkeypatch.setattr(token, "_made", {})
    monkeypatch.setattr(token, "machine", lambda: str(both_are_there.wait() * 0))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: token.this_process(), range(2))
    assert first is second is token.this_process()


def test_a_call_of_this_process_is_alive_until_it_has_ended() -> None:
    value = TokenFactory("work").token(600)
    active_tokens[value] = None
    assert not is_dead(value)
    del active_tokens[value]
    assert is_dead(value)


def test_a_start_is_counted_in_ticks_since_boot_whatever_the_name_of_the_process() -> None:
    tick, before = 1 / os.sysconf("SC_CLK_TCK"), now()
    with Acquirer() as process:
        start = json.loads(process.value)["process_start"]
        if start is None:
            pytest.skip("no start time can be read here")
        assert before - 2 * tick <= start * tick <= now() + tick
    own, comm = process_start(os.getpid()), Path(f"/proc/{os.getpid()}/comm")
    name = comm.read_text(encoding="utf-8")
    try:
        comm.write_text("a) 1 (b", encoding="utf-8")
        assert process_start(os.getpid()) == own
    finally:
        comm.write_text(name, encoding="utf-8")


@contextmanager
def as_nobody() -> Iterator[None]:
    """This process is another user's meanwhile, if it is root's and so can become that."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


@pytest.mark.sees_mutmut
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_process_of_another_user_is_alive(monkeypatch: pytest.MonkeyPatch, *, is_hidden: bool) -> None:
    """Unless it can be seen that it is another than the holder."""
    start = process_start(1)
    if start is None:
        pytest.skip("no start time can be read here")
    if is_hidden:
        monkeypatch.setattr(liveness, "process_start", lambda _: None)
    liveness._may_have_begun.cache_clear()
    with as_nobody():
        with pytest.raises(PermissionError):
            os.kill(1, 0)
        assert not is_dead(changed(DEAD, pid=1, process_start=start))
        assert is_dead(changed(DEAD, pid=1, process_start=start + 1)) is not is_hidden


# Other machines


@pytest.mark.parametrize(("part", "other"), [(0, "another"), (1, "another"), (2, "pid:[1]"), (3, "time:[1]")])
def test_another_host_or_boot_or_namespace_is_another_machine(part: int, other: str) -> None:
    parts = json.loads(DEAD)["machine"].split("/")
    files = [Path("/proc/self/ns/pid"), Path("/proc/self/ns/time")]
    assert parts[2:] == [str(file.readlink()) if file.is_symlink() else "" for file in files]
    parts[part] = other
    elsewhere = changed(DEAD, machine="/".join(parts))
    assert [is_dead(elsewhere), is_gone(elsewhere)] == [False, False]


GONE = """
import os
from only_one.lock.token import TokenFactory
from only_one.lock import token
from only_one.lock.liveness import is_dead

ours, theirs = os.pipe()
pid = os.fork()
if not pid:
    os.write(theirs, TokenFactory("work").token(600))
    os._exit(0)
value = os.read(ours, 10_000)
os.waitpid(pid, 0)
own = TokenFactory("work").token(600)
token.active_tokens[own] = None
print(token.machine(), is_dead(value), is_dead(own), os.path.exists("/proc/self"))
"""
"""It prints its machine, whether a child that is gone is dead, whether it is itself, and whether /proc is there."""


@in_container
def test_a_child_that_is_gone_is_dead_in_a_container() -> None:
    """The three below tell nothing where this is not so."""
    machine, *rest = said(GONE, CONTAINER)
    assert machine.startswith(f"{socket.gethostname()}/")
    assert rest == ["True", "False", "True"]


@pytest.mark.skipif(HIDDEN_PROC is None, reason="no mount namespace can be made here")
def test_without_a_proc_nobody_is_dead() -> None:
    assert said(GONE, HIDDEN_PROC, "mount -t tmpfs none /proc &&") == ["None", "False", "False", "False"]


@pytest.mark.skipif(FOREIGN_PROC is None, reason="no pid namespace can be made here")
def test_with_the_proc_of_others_nobody_is_dead() -> None:
    """Their numbers mean others there."""
    assert said(GONE, FOREIGN_PROC)[:3] == ["None", "False", "False"]


def test_on_a_platform_without_a_proc_nobody_is_dead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(token, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    for module in (token, liveness):
        monkeypatch.setattr(module, "this_process", token._Process)
    mine = parse(TokenFactory("work").token(600))
    assert (mine.machine, mine.process_start) == (socket.gethostname(), None)
    values = [DEAD, *(changed(DEAD, machine=machine) for machine in (None, mine.machine))]
    values += [changed(value, process_start=None) for value in values]
    assert not any(map(is_dead, values))
    assert not any(map(is_gone, values))


def test_a_kernel_without_time_namespaces_and_one_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before Linux 5.6; and what a machine is called, as it must be the same for all that use this format."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("the-boot\n", encoding="ascii")
    (tmp_path / "proc/self").symlink_to(str(os.getpid()))
    (tmp_path / f"proc/{os.getpid()}/ns").mkdir(parents=True)
    (tmp_path / f"proc/{os.getpid()}/ns/pid").symlink_to("pid:[1]")
    monkeypatch.setattr(token, "Path", lambda path: tmp_path / path.lstrip("/") if path.startswith("/") else Path(path))
    assert token.machine() == f"{socket.gethostname()}/the-boot/pid:[1]/"
    (tmp_path / f"proc/{os.getpid()}/ns/time").symlink_to("time:[2]")
    assert token.machine() == f"{socket.gethostname()}/the-boot/pid:[1]/time:[2]"


# Values that name no process that could be dead


def test_a_retained_value_is_not_dead_nor_is_a_task_that_this_process_has_received() -> None:
    assert kept(DEAD, 600) == changed(DEAD, state="kept", limit=600_000)
    received = TokenFactory("t", "the-id", 0, "received").token(600)
    assert not any(map(is_dead, [kept(DEAD, 600), kept(TokenFactory("work").token(600), 600), received]))


NO_IDS: list[Any] = [0, -1, -99_999_999, 2**31, 2**63, 2**64, 10**30, True, "1", None, 1.5, [], {}]
NOT_DEAD: list[Any] = [
    *({"pid": pid} for pid in NO_IDS),
    *({"state": state} for state in ("kept", "queued", "", "Running")),
    {"only_one": 2},
    *({name: "2"} for name in ("replacement", "process_start", "attempt", "limit", "since", "number")),
    *({name: 2} for name in ("host", "process", "name", "task_id")),
    # Of a time that is further away no date could be made.
    *({name: far} for name in ("since", "limit") for far in (-(10**14) - 1, 10**14 + 1, 10**1000)),
]
STILL_DEAD: list[Any] = [{"state": "received"}, *({"since": far, "limit": far} for far in (10**14, -(10**14)))]


@pytest.mark.parametrize("changes", [*NOT_DEAD, *STILL_DEAD])
def test_another_process_id_or_state_or_version_or_time_is_not_dead(changes: dict[str, object]) -> None:
    """Unless it is one that can be read, of a run or of a task that was received."""
    value = changed(DEAD, **changes)
    assert is_dead(value) is (changes in STILL_DEAD)
    assert is_gone(value) is ("state" in changes or changes in STILL_DEAD)  # whose process can be read, and is gone


def test_a_value_that_only_begins_like_one_of_ours_or_is_serialized_otherwise_is_not_dead() -> None:
    fields = json.loads(DEAD)
    values = [json.dumps(fields, indent=1).encode()]
    del fields["attempt"]
    values.append(json.dumps(fields, separators=(",", ":")).encode())
    for damage in (b"", b"}", b"\x00", b"\xff", b" ", b"[" * 100_000, b"2", b"[]", b"null"):
        values += [DEAD[: DEAD.index(b'"state"')] + damage, damage]
    assert not any(map(Holder.parse, values[1:]))
    assert not any(map(task_id_of, values[1:]))
    assert not any(is_queued(value.replace(b'"running"', b'"queued"')) for value in values[1:])
    assert not any(map(is_dead, values))
    assert not any(map(is_gone, values))


# What is remembered


def test_who_was_just_seen_alive_is_not_read_of_again(process: Acquirer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip is to cost no more than it must; the look is repeated after a while."""
    look = Mock(wraps=process_start)
    begin = float(int(now()) + 10)
    monkeypatch.setattr(liveness, "process_start", look)
    for moment, looks in ((begin, 1), (begin + 0.99, 1), (begin + 1.0, 2)):
        monkeypatch.setattr(liveness, "now", lambda moment=moment: moment)
        assert not any(is_dead(changed(process.value, number=number)) for number in range(100))
        assert look.call_args_list == [call(process.pid)] * looks
