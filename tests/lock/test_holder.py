"""Which holders are dead: real processes that live, stop, die and come back under the same number."""

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

import pytest

from only_one.lock import token as holder
from only_one.clock import now
from only_one.holder import Holder, printable
from only_one.lock import token
from only_one.lock.liveness import is_dead, is_gone
from only_one.lock.token import TokenFactory, active_tokens, kept, process_start
from rigs.namespaces import MACHINE, unshare
from rigs.waiting import LIMIT, eventually

SPELLS = """
import sys
from only_one.lock.token import TokenFactory
print(TokenFactory("work").token(600).decode(), flush=True)
sys.stdin.read()
"""


CONTAINER = unshare(*MACHINE)
FOREIGN_PROC = unshare("--pid", "--uts")
HIDDEN_PROC = unshare("--mount")
TIME = unshare("--time", "--boottime", "1000")

in_container = pytest.mark.skipif(CONTAINER is None, reason="no pid namespace can be made here")


class Process:
    """A process that has spelt a token, and lives until it is ended.

    Attributes:
        value: the token.
        pid: its process id as we see it.
    """

    def __init__(self, inside: Sequence[str] = ()) -> None:
        command = [*inside, sys.executable, "-c", SPELLS]
        # Not guarded: it is for the test to say when it is waited for. It ends with us, as its stdin does.
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdout is not None
        self.value = self.popen.stdout.readline().strip()
        self.pid = self.popen.pid

    def become_zombie(self) -> None:
        """End it, and do not wait for it."""
        self.popen.kill()
        assert os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def kill(self) -> None:
        """End it and wait for it, so that nothing is left of it."""
        self.popen.kill()
        assert self.popen.wait(LIMIT) == -signal.SIGKILL


@contextmanager
def started(inside: Sequence[str] | None = ()) -> Iterator[Process]:
    """A process that lives until the end of the block, unless it is ended there."""
    assert inside is not None
    process = Process(inside)
    with process.popen:
        try:
            yield process
        finally:
            process.popen.kill()


@pytest.fixture
def process() -> Iterator[Process]:
    with started() as process:
        yield process


@pytest.fixture(scope="module")
def living() -> Iterator[Process]:
    """One that no test ends."""
    with started() as process:
        yield process


@pytest.fixture(scope="module")
def dead() -> bytes:
    """The token of a process that is gone, and was never seen alive."""
    with started() as process:
        process.kill()
        assert is_dead(process.value)
        return process.value


def test_clones_of_a_process_do_not_spell_the_same_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a virtual machine that is cloned: what it draws at random it has drawn, and all its clones count alike."""
    identity, moment = TokenFactory("work"), time.time_ns()
    tokens = []
    for microseconds in (1, 2):
        monkeypatch.setattr(token.this_process(), "numbers", itertools.count(7))
        monkeypatch.setattr(time, "time_ns", lambda later=microseconds: moment // 10**6 * 10**6 + later * 1000)
        tokens.append(identity.token(600))
    assert tokens[0] != tokens[1]
    ours, theirs = map(Holder.parse, tokens)
    assert ours is not None
    assert theirs is not None
    assert ours.id != theirs.id
    assert ours.since == theirs.since


def test_what_a_call_has_in_common_is_spelt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for another limit."""
    identity = TokenFactory("work")
    first = identity.token(60)
    monkeypatch.setattr(token.this_process(), "serialized", None)
    second = identity.token(60)
    monkeypatch.undo()
    limits = [json.loads(token)["limit"] for token in (first, second, identity.token(30), identity.token(None))]
    assert limits == [60_000, 60_000, 30_000, None]
    assert len(bytes.fromhex(json.loads(first)["process"])) == 8  # so that no two processes ever draw the same


def test_a_holder_is_shown_and_not_changed() -> None:
    with_task, without = (Holder.parse(TokenFactory("a\nb", task_id).token(60)) for task_id in ("the-id", None))
    assert str(with_task) == f"a\\nb (task the-id), pid {os.getpid()} on {socket.gethostname()}"
    assert str(without) == f"a\\nb, pid {os.getpid()} on {socket.gethostname()}"
    assert printable("a\x1b[2J\r") == "a\\x1b[2J\\r"
    with pytest.raises(dataclasses.FrozenInstanceError):
        with_task.state = "kept"  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("what", ["since", "limit"])
def test_a_time_that_somebody_has_made_up_is_no_holders(what: str) -> None:
    """No date could be made of it."""
    token = TokenFactory("work").token(60)
    for milliseconds in (-(10**14), 10**14):
        assert Holder.parse(changed(token, **{what: milliseconds})) is not None
    for milliseconds in (-(10**14) - 1, 10**14 + 1, 10**1000):
        assert Holder.parse(changed(token, **{what: milliseconds})) is None


def changed(value: bytes, **changes: object) -> bytes:
    """A token with other things in it, spelt as tokens are."""
    return json.dumps({**json.loads(value), **changes}, separators=(",", ":")).encode()


def test_a_value_that_is_changed_in_nothing_is_the_same(living: Process) -> None:
    """Else the tests below would change more than they say, and none of their holders would be looked at."""
    assert changed(living.value) == living.value


# Processes


def test_a_process_that_lives_and_is_killed(process: Process) -> None:
    assert not is_dead(process.value)
    assert not is_gone(process.value)
    process.kill()
    assert is_dead(process.value)
    assert is_dead(process.value)
    assert is_gone(process.value)


def test_a_process_that_ended_by_itself(process: Process) -> None:
    process.popen.communicate()
    assert process.popen.returncode == 0
    assert is_dead(process.value)


def test_a_zombie_is_alive_until_it_is_waited_for(process: Process) -> None:
    process.become_zombie()
    assert not is_dead(process.value)
    process.popen.wait()
    assert is_dead(process.value)


def test_a_stopped_process_is_alive(process: Process) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not is_dead(process.value)


def test_the_calls_of_this_process_are_alive_until_they_have_ended() -> None:
    with ThreadPoolExecutor(1) as pool:
        values = [TokenFactory("work").token(600), pool.submit(TokenFactory("work").token, 600).result()]
        active_tokens.update(values)
        assert not any(map(is_dead, values))
        assert not any(pool.map(is_dead, values))
        active_tokens.difference_update(values)
        assert all(map(is_dead, values))
        assert all(pool.map(is_dead, values))


def test_a_key_that_this_process_keeps_is_not_dead() -> None:
    assert not is_dead(kept(TokenFactory("work").token(600), 60))


def test_a_start_that_differs_is_another_process(living: Process) -> None:
    start = json.loads(living.value)["process_start"]
    if start is None:
        pytest.skip("no start time can be read here")
    assert is_dead(changed(living.value, process_start=start - 1))
    assert is_dead(changed(living.value, process_start=start + 1))
    assert is_gone(changed(living.value, process_start=start + 1))
    assert not is_dead(changed(living.value, process_start=start))


def test_a_start_that_is_not_known_is_no_evidence(process: Process) -> None:
    value = changed(process.value, process_start=None)
    assert not is_dead(value)
    process.kill()
    assert is_dead(value)


def test_a_number_that_is_a_thread_of_another_by_now(process: Process) -> None:
    """`kill` finds threads by their number, too."""
    start = json.loads(process.value)["process_start"]
    process.kill()
    assert eventually(lambda: process_start(os.getpid()) is None or begins_now() != start)
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        assert thread != os.getpid()
        os.kill(thread, 0)
        assert is_dead(changed(process.value, pid=thread))


def begins_now() -> int | None:
    """The start of a thread that begins now; it is counted in ticks, of which several threads may share one."""
    with ThreadPoolExecutor(1) as pool:
        return process_start(pool.submit(threading.get_native_id).result())


REUSED = """
import os, sys, time
from pathlib import Path
from only_one.lock.token import TokenFactory, process_start
from only_one.lock.liveness import is_dead

def child():
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(theirs, TokenFactory("work").token(600))
        time.sleep(600)
    os.close(theirs)
    return pid, os.read(ours, 10_000)

def end(pid):
    os.kill(pid, 9)
    os.waitpid(pid, 0)

pid, value = child()
seen = sys.argv[1] == "seen alive" and not is_dead(value)
end(pid)
begun = process_start(os.getpid())
other = None
until = time.monotonic() + 120
while time.monotonic() < until:
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    other, others = child()
    if other == pid and others.partition(b'"process":')[0] != value.partition(b'"process":')[0]:
        break
    end(other)
found, until = False, time.monotonic() + 120
while not found and time.monotonic() < until:
    found = is_dead(value)
    if not seen:
        break
    time.sleep(0.01)
print(other == pid, seen, found, is_dead(others))
end(other)
"""


@in_container
@pytest.mark.parametrize("before", ["seen alive", "not seen"])
def test_a_number_that_is_given_to_another_process(before: str) -> None:
    """For one that was just seen alive it may take a second to be noticed; one that is gone altogether takes none."""
    assert CONTAINER is not None
    command = [*CONTAINER, sys.executable, "-W", "ignore", "-c", REUSED, before]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(before == "seen alive"), "True", "False"]


FORKED = """
import os, time
from only_one.lock.token import TokenFactory, active_tokens
from only_one.lock.liveness import is_dead

def parent():
    mine = TokenFactory("work").token(600)
    ours, theirs = os.pipe()
    if not os.fork():
        child(mine, theirs)
        os._exit(0)
    os.close(theirs)
    print(is_dead(os.read(ours, 10_000)), flush=True)

def child(its, theirs):
    before, pid = is_dead(its), os.getppid()
    own = TokenFactory("work").token(600)
    active_tokens.add(own)
    os.write(theirs, own)
    until = time.monotonic() + 120
    while not is_dead(its) and time.monotonic() < until:
        time.sleep(0.01)
    print(before, os.getppid() == pid, is_dead(its), is_dead(own), flush=True)

pid = os.fork()
if not pid:
    parent()
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_forked_child_is_another_process_than_its_parent() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True", "False"]


FORKED_BETWEEN_CALLS = """
import os
from only_one.holder import Holder
from only_one.lock.token import TokenFactory

factory = TokenFactory("work")
before = Holder.parse(factory.token(600))
pid = os.fork()
after = Holder.parse(factory.token(600))
print(after.pid == os.getpid(), after.id.split("-")[0] == before.id.split("-")[0], flush=True)
if not pid:
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_function_that_has_run_before_a_fork_runs_as_the_child_after_it() -> None:
    """The beginning of its tokens is remembered, and is the parent's."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED_BETWEEN_CALLS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["True False", "True True"]  # the child, and the parent


OTHERS = """
import json, os, sys, time
from only_one.lock.token import TokenFactory, process_start
from only_one.lock.liveness import is_dead

def changed(value, **changes):
    return json.dumps({**json.loads(value), **changes}, separators=(",", ":")).encode()

TokenFactory("work").token(600)  # all that it takes is imported while the files can be read
if os.geteuid() == 0:
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(1)
        os.write(theirs, TokenFactory("work").token(600))
        time.sleep(600)
    value = os.read(ours, 10_000)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
else:
    pid = 1
    ours, theirs = os.pipe()
    if not os.fork():
        os.write(theirs, TokenFactory("work").token(600))
        os._exit(0)
    value = changed(os.read(ours, 10_000), pid=pid, process_start=process_start(pid))
try:
    os.kill(pid, 0)
except PermissionError:
    pass
else:
    sys.exit("we may ask, so nothing is shown")
start = process_start(pid)
print(start is not None, is_dead(value), is_dead(changed(value, process_start=(start or 0) + 1)), flush=True)
"""


def run_as_others(inside: Sequence[str] = (), before: str = "") -> list[str]:
    """What a process finds of another user's: can its start be read, is it dead, is one with another start."""
    python = [sys.executable, "-W", "ignore", "-c", OTHERS]
    command = ["sh", "-c", f'{before} exec "$@"', "sh", *python] if before else python
    with subprocess.Popen([*inside, *command], stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        try:
            assert program.stdout is not None
            return program.stdout.readline().split()
        finally:
            os.killpg(program.pid, signal.SIGKILL)


def test_a_process_of_another_user_is_alive() -> None:
    """Unless it can be seen that it is another than the holder."""
    readable, dead, another_is_dead = run_as_others()
    assert dead == "False"
    assert another_is_dead == readable


@pytest.mark.skipif(os.geteuid() != 0 or CONTAINER is None, reason="only root can hide processes from others")
def test_a_process_of_another_user_that_is_hidden_is_alive() -> None:
    assert CONTAINER is not None
    remount = "mount -o remount,hidepid=2 /proc &&"
    assert run_as_others([*CONTAINER], remount) == ["False", "False", "False"]


# Other machines


def test_a_machine_is_the_same_for_all_of_its_processes(living: Process) -> None:
    mine, its = json.loads(TokenFactory("work").token(600)), json.loads(living.value)
    assert (mine["machine"], mine["host"]) == (its["machine"], its["host"])
    assert mine["pid"] != its["pid"]


@in_container
def test_a_container_of_the_same_name_is_another_machine() -> None:
    with started(CONTAINER) as process:
        its = json.loads(process.value)
        assert its["host"] == socket.gethostname()
        assert its["machine"] != token.machine()
        assert its["pid"] == 1
        assert not is_dead(process.value)
        process.kill()
        assert not is_dead(process.value)
        # Nor where its number is nobody's here, or another's.
        assert not is_dead(changed(process.value, pid=process.pid))
        assert not is_dead(changed(process.value, process_start=1))


@pytest.mark.parametrize("change", ["host", "boot", "namespace", "clock"])
def test_another_host_or_boot_or_namespace_is_another_machine(dead: bytes, change: str) -> None:
    host, boot, namespace, clock = json.loads(dead)["machine"].split("/")
    assert [namespace, clock] == [
        str(file.readlink()) if file.is_symlink() else ""
        for file in map(Path, ("/proc/self/ns/pid", "/proc/self/ns/time"))
    ]
    others = {
        "host": f"{host}2/{boot}/{namespace}/{clock}",
        "boot": f"{host}/{boot[::-1]}/{namespace}/{clock}",
        "namespace": f"{host}/{boot}/pid:[1]/{clock}",
        "clock": f"{host}/{boot}/{namespace}/time:[1]",
    }
    assert is_dead(dead)
    assert not is_dead(changed(dead, machine=others[change]))
    assert is_gone(dead)
    assert not is_gone(changed(dead, machine=others[change]))


GONE = """
import os
from only_one.lock import token as holder
from only_one.lock.token import TokenFactory
from only_one.lock.liveness import is_dead

ours, theirs = os.pipe()
pid = os.fork()
if not pid:
    os.write(theirs, TokenFactory("work").token(600))
    os._exit(0)
value = os.read(ours, 10_000)
os.waitpid(pid, 0)
own = TokenFactory("work").token(600)
token.active_tokens.add(own)
print(token.machine(), is_dead(value), is_dead(own), os.path.exists("/proc/self"))
"""


def gone(inside: Sequence[str], before: str = "") -> list[str]:
    """What a process says of its machine, of a child of its that is gone, of itself, and of /proc."""
    python = [sys.executable, "-W", "ignore", "-c", GONE]
    command = ["sh", "-c", f'{before} exec "$@"', "sh", *python] if before else python
    done = subprocess.run([*inside, *command], capture_output=True, text=True, check=True)
    return done.stdout.split()


@in_container
def test_a_child_that_is_gone_is_dead_in_a_container() -> None:
    """The three below tell nothing where this is not so."""
    assert CONTAINER is not None
    machine, dead, own, proc = gone(CONTAINER)
    assert machine.startswith(f"{socket.gethostname()}/")
    assert (dead, own, proc) == ("True", "False", "True")


@pytest.mark.skipif(HIDDEN_PROC is None, reason="no mount namespace can be made here")
def test_without_a_proc_nobody_is_dead() -> None:
    assert HIDDEN_PROC is not None
    assert gone(HIDDEN_PROC, "mount -t tmpfs none /proc &&") == ["None", "False", "False", "False"]


@pytest.mark.skipif(FOREIGN_PROC is None, reason="no pid namespace can be made here")
def test_with_the_proc_of_others_nobody_is_dead() -> None:
    """Their numbers mean others there."""
    assert FOREIGN_PROC is not None
    assert gone(FOREIGN_PROC)[:3] == ["None", "False", "False"]


def test_on_a_platform_without_a_proc_nobody_is_dead(
    dead: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(holder, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr(holder, "_this_process", token._Process)
    assert token.machine() is None
    assert process_start(os.getpid()) is None
    mine = Holder.parse(TokenFactory("work").token(600))
    assert mine is not None
    assert (mine.machine, mine.process_start) == (socket.gethostname(), None)
    assert not is_dead(dead)
    assert not is_gone(dead)
    for machine in (None, mine.machine, mine.host):
        assert not is_dead(changed(dead, machine=machine, process_start=None))
        assert not is_gone(changed(dead, machine=machine, process_start=None))
        assert not is_dead(changed(dead, machine=machine))


def test_a_kernel_without_time_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before Linux 5.6; and what a machine is called, as it must be the same for all that use this format."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("the-boot\n", encoding="ascii")
    (tmp_path / "proc/self").symlink_to(str(os.getpid()))
    (tmp_path / f"proc/{os.getpid()}/ns").mkdir(parents=True)
    (tmp_path / f"proc/{os.getpid()}/ns/pid").symlink_to("pid:[1]")
    monkeypatch.setattr(
        holder, "Path", lambda path: tmp_path / path.lstrip("/") if path.startswith("/") else Path(path)
    )
    assert token.machine() == f"{socket.gethostname()}/the-boot/pid:[1]/"


@pytest.mark.skipif(TIME is None, reason="no time namespace can be made here")
def test_a_process_whose_clock_counts_from_another_boot_is_alive() -> None:
    with started(TIME) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
        assert children == [str(json.loads(process.value)["pid"])]  # it is there, in our own pid namespace
        assert not is_dead(process.value)


# What stands there and is no process


@pytest.mark.parametrize("state", ["kept", "queued", "", "Running"])
def test_a_key_that_is_no_running_process_s_has_no_process_to_be_dead(dead: bytes, state: str) -> None:
    assert not is_dead(changed(dead, state=state))


def test_a_task_that_was_received_is_dead_with_its_worker(dead: bytes) -> None:
    assert is_dead(changed(dead, state="received"))
    assert not is_dead(TokenFactory("t", "the-id", 0, "received").token(600))


def test_a_key_that_is_kept_is_not_dead(dead: bytes) -> None:
    value = kept(dead, 600)
    found = Holder.parse(value)
    assert found is not None
    assert (found.state, found.pid) == ("kept", json.loads(dead)["pid"])
    assert value == changed(dead, state="kept", limit=600_000)
    assert is_dead(dead)
    assert not is_dead(value)


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**63, 2**64, 10**30, True])
def test_a_forged_number_is_not_dead(dead: bytes, pid: Any) -> None:
    assert not is_dead(changed(dead, pid=pid))


def test_a_forged_number_below_zero_is_not_dead(dead: bytes) -> None:
    assert not is_dead(changed(dead, pid=-99_999_999))


@pytest.mark.parametrize("pid", ["1", None, 1.5, [], {}])
def test_what_is_no_number_is_not_dead(dead: bytes, pid: object) -> None:
    assert not is_dead(changed(dead, pid=pid))


@pytest.mark.parametrize("damage", [b"", b"}", b"\x00", b"\xff", b" ", b"[" * 100_000])
def test_a_value_that_only_begins_like_one_of_ours_is_not_dead(dead: bytes, damage: bytes) -> None:
    head = dead[: dead.index(b'"state"')]
    assert is_dead(dead)
    assert not is_dead(head + damage)
    assert not is_gone(head + damage)
    assert not is_dead(damage)


def test_a_value_of_a_later_version_is_read(dead: bytes) -> None:
    """Unknown fields are ignored; a field that the first version did not have may be missing."""
    later = changed(dead, more="of it")
    assert Holder.parse(later) == Holder.parse(dead)
    assert is_dead(later)
    replaced = Holder.parse(TokenFactory("work", "the-id", 0, replacement=2).token(60))
    assert replaced is not None
    assert replaced.replacement == 2
    assert b"replacement" not in TokenFactory("work", "the-id", 0).token(60), "the first version refuses it"
    assert Holder.parse(changed(dead, replacement="2")) is None


def test_another_spelling_or_another_version_is_not_dead(dead: bytes) -> None:
    found = json.loads(dead)
    assert not is_dead(json.dumps(found, indent=1).encode())
    assert not is_dead(changed(dead, only_one=2))
    del found["attempt"]
    assert not is_dead(json.dumps(found, separators=(",", ":")).encode())


# What is remembered


def test_what_is_remembered_of_the_living_has_an_end(process: Process) -> None:
    values = [changed(process.value, number=number) for number in range(1001)]
    assert not any(map(is_dead, values))
    assert holder._parse.cache_info().currsize == 1000
    process.kill()
    assert all(map(is_dead, values))


def test_who_was_just_seen_alive_is_not_read_of_again(living: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skip is to cost no more than it must; the look is repeated after a while."""
    looked = []

    def look(pid: int) -> int | None:
        looked.append(pid)
        return process_start(pid)

    moment = float(int(now()) + 10)
    until = moment + 1.0
    assert not is_dead(living.value)  # and knows who it is itself
    monkeypatch.setattr(holder, "process_start", look)
    monkeypatch.setattr(holder, "now", lambda: moment)
    assert not any(is_dead(changed(living.value, number=number)) for number in range(100))
    assert looked == [living.pid]
    moment += 0.99
    assert not is_dead(living.value)
    assert looked == [living.pid]
    moment = until
    assert not is_dead(living.value)
    assert looked == [living.pid] * 2


def test_a_holder_is_parsed_once_and_what_is_too_long_for_one_is_not_remembered() -> None:
    value = TokenFactory("parsed once").token(None)
    assert Holder.parse(value) is Holder.parse(value) is not None
    assert Holder.parse(value.decode()) == Holder.parse(value)
    foreign = b'{"only_one":1,"text":"%s"}' % (b"x" * 3000)
    looked_up = holder._parse.cache_info()
    assert Holder.parse(foreign) is None
    assert holder._parse.cache_info() == looked_up
