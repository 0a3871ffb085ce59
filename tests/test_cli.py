"""The commands, in the process of the test where that will do, as a program, and as a plugin of the celery command."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis import Redis, RedisCluster

from only_one import configure
from only_one.__main__ import _cell, main
from only_one.lock.token import TokenFactory
from rigs.waiting import LIMIT
from tests.decorated import CLOSED, Busy, token_of_the_dead

Out = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("redis")


@pytest.fixture
def dead(redis: Redis, prefix: str) -> str:
    """A key whose holder was killed."""
    redis.set(f"{prefix}dead", token_of_the_dead(), px=600_000)
    return f"{prefix}dead"


def store(redis: Redis, key: str, state: str = "queued", name: str = "t", lasts: float | None = 3600) -> str:
    """Have a task of the state hold a key."""
    redis.set(key.encode(errors="surrogateescape"), TokenFactory(name, "the-id", 0, state).token(lasts), px=600_000)
    return key


def seconds_until(time: str) -> int:
    """What is left, in multiples of ten minutes: some time has gone by."""
    return round((datetime.fromisoformat(time) - datetime.now(timezone.utc)) / timedelta(minutes=10)) * 600


def test_a_list_is_plain_rows_or_json(redis: Redis, prefix: str, busy: Busy, dead: str, capsys: Out) -> None:
    queued = store(redis, f"{prefix}queued")
    store(redis, f"{prefix}received", "received", lasts=None)
    store(redis, f"{prefix}extended", "received", lasts=-1)  # so its holder has asked for more time
    redis.set(f"{prefix}\x1b[31m", b"\xff\x1b", px=600_000)
    redis.set(f"{{{prefix}alive}}:fence", 1)  # beside a key, and no key itself
    with busy("alive", lease=1200), busy("limited", lease=600, timeout=3600):
        assert main(["list", "--json"]) == main(["list"]) == 0

    lines = capsys.readouterr().out.splitlines()
    facts = {each["key"]: each for each in map(json.loads, lines[:7])}
    ends = {key: each["free_by"] and seconds_until(each["free_by"]) for key, each in facts.items()}
    assert {key: (each["state"], ends[key], each["process"]) for key, each in facts.items()} == {
        queued: ("queued", 600, None),
        f"{prefix}received": ("received", None, "alive"),
        f"{prefix}extended": ("received", None, "alive"),
        f"{prefix}alive": ("running", None, "alive"),
        f"{prefix}limited": ("running", 3600, "alive"),
        dead: ("running", 600, "dead"),
        f"{prefix}\x1b[31m": ("foreign", 600, None),
    }
    expected = {"task": "t", "id": "the-id", "attempt": 0, "host": socket.gethostname(), "pid": os.getpid()}
    assert {name: facts[queued][name] for name in expected} == expected
    assert 1200 - LIMIT < facts[f"{prefix}alive"]["expires_in"] <= 1200
    assert facts[f"{prefix}\x1b[31m"]["value"] == "\\xff\x1b"

    rows = {row[0]: row[1:] for row in (line.split("\t") for line in lines[7:])}
    assert rows.keys() == {key.replace("\x1b", "\\x1b") for key in facts}
    *texts, since, age, free_by, process = rows[queued]
    assert [*texts, process] == ["queued", "t", "the-id", socket.gethostname(), str(os.getpid()), "-"]
    assert (datetime.fromisoformat(since).microsecond, seconds_until(since), seconds_until(free_by)) == (0, 0, 600)
    assert 0 <= int(age) < LIMIT


def test_the_server_and_the_prefix_are_written_before_a_command_or_after_it(
    redis_url: str, prefix: str, dead: str, capsys: Out
) -> None:
    server, begins = ["--redis", redis_url], ["--prefix", prefix]
    with configure(redis=CLOSED, prefix="another:"):
        for command in (["list", "--match", "dead"], ["show", "dead", "--json"], ["release", "dead"]):
            written = ([*server, *begins, *command], [*command, *server, *begins], [*begins, *command, *server])
            answers = [(main(arguments), capsys.readouterr()) for arguments in written]
            assert [status for status, _ in answers] == ([0, 1, 1] if command[0] == "release" else [0, 0, 0])
            assert all(dead in shown.out or "it is free" in shown.err for _, shown in answers)


def test_foreign_values_are_shown_escaped(redis: Redis, prefix: str, capsys: Out) -> None:
    redis.set(f"{prefix}\x1b[2J", b"\x1b]0;owned\x07\xff\n" + b"x" * 10_000)

    show, release = ["show", "\x1b[2J"], ["release", "\x1b[2J"]
    for command, status in ((["list"], 0), (show, 0), (release, 1), ([*release, "--force"], 0), (show, 1)):
        assert main(command) == status

        shown = capsys.readouterr()
        assert "\\x1b[2J" in shown.out + shown.err
        assert not {"\x1b", "\x07", "\ufffd"} & set(shown.out + shown.err)
        assert max(map(len, (shown.out + shown.err).splitlines())) < 700
    assert [_cell("x" * 200), _cell("x" * 201)] == ["x" * 200, "x" * 199 + "…"]


def test_a_table_on_a_terminal(redis: Redis, redis_url: str, prefix: str) -> None:
    store(redis, f"{prefix}a", name="a task")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "only_one", "--redis", redis_url, "--prefix", prefix, "list"]
    subprocess.run(command, stdout=theirs, check=True)
    os.close(theirs)
    heads, row = os.read(ours, 10_000).decode().splitlines()
    os.close(ours)
    for head, cell in [("key", prefix), ("state", "queued"), ("task", "a task"), ("id", "the-id"), ("process", "-")]:
        assert row[heads.index(head) :].startswith(cell)
    assert "free by" in heads


@pytest.mark.parametrize(
    "name",
    [
        f"{'a' * 200}:{'b' * 200}",
        "東京\u3000駅",
        "a\n\t\r\x1b[31mb",
        "\U0001f468\u200d\U0001f469\U000e0001",
        b"\xff\xe9".decode(errors="surrogateescape"),
    ],
)
def test_a_key_is_freed_as_it_is_shown(redis: Redis, prefix: str, capsys: Out, name: str) -> None:
    store(redis, f"{prefix}{name}")
    main(["list"])
    key = capsys.readouterr().out.partition("\t")[0]
    assert main(["show", key]) == 0
    assert f"{key}\n" in capsys.readouterr().out
    assert main(["release", key]) == 0


ELSEWHERE = TokenFactory("f").token(3600).replace(b'"machine":"', b'"machine":"elsewhere')


def test_what_is_freed_by_name(redis: Redis, prefix: str, busy: Busy, dead: str, capsys: Out) -> None:
    """A dead holder and a queued task; others by force, but no value of another type."""
    queued = store(redis, f"{prefix}queued")
    redis.set(f"{prefix}elsewhere", ELSEWHERE, px=600_000)
    redis.lpush(f"{prefix}list", "x")

    with busy("alive"):
        assert main(["release", "queued", dead, "nothing", "elsewhere", "alive"]) == 1
        left = {f"{prefix}{name}".encode() for name in ("elsewhere", "alive", "list")}
        assert {*redis.keys(f"{prefix}*")} == left
        assert main(["release", "--force", "list", "alive"]) == 1
        assert {*redis.keys(f"{prefix}*")} == left - {f"{prefix}alive".encode()}
    assert main(["show", "list"]) == 0

    shown = capsys.readouterr()
    assert f"{queued} was freed, held by t (task the-id), pid {os.getpid()}" in shown.out
    for words in (f"{dead} was freed", f"{prefix}alive was freed, held by", "a value of another type"):
        assert words in shown.out
    for words in ("nothing was not freed: it is free", "not known to be dead", "redis-cli deletes it"):
        assert words in shown.err
    assert f"pid {os.getpid()}" in shown.err
    assert "is alive; --force frees it" in shown.err


@pytest.mark.parametrize(
    "which", ["--dead", *(f"--queued={time}" for time in ("3600", "3600s", "60m", "1h", "0.0416d"))]
)
def test_all_that_are_dead_or_have_been_queued_for_longer_are_freed_and_no_others(
    redis: Redis, prefix: str, busy: Busy, dead: str, capsys: Out, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    began = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: began - 2000 * 10**9)
    store(redis, f"{prefix}younger")
    monkeypatch.setattr(time, "time_ns", lambda: began - 5400 * 10**9)
    store(redis, f"{prefix}old")
    store(redis, f"{prefix}received", "received")
    redis.set(f"{prefix}running", ELSEWHERE, px=600_000)
    monkeypatch.undo()
    store(redis, f"{prefix}new")
    redis.set(f"{prefix}foreign", "x")
    before = set(redis.keys(f"{prefix}*"))
    freed = dead if which == "--dead" else f"{prefix}old"

    with busy("alive"):
        assert main(["release", which, "--match", "n*"]) == 0
        assert before <= set(redis.keys(f"{prefix}*"))
        assert main(["--prefix", prefix, "release", which]) == 0
        assert redis.exists(f"{prefix}alive")
    assert set(redis.keys(f"{prefix}*")) == before - {freed.encode()}
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{freed} was freed, held by {'f' if which == '--dead' else 't (task the-id)'}")


@pytest.mark.parametrize("closes", ["", ">&-", "2>&-"])
@pytest.mark.parametrize(
    ("command", "status", "left"), [("list", 0, 2), ("release k 1 2", 1, 0), ("release --dead", 0, 0)]
)
def test_all_is_done_though_nobody_reads_what_has_become_of_it(
    redis: Redis, redis_url: str, prefix: str, command: str, status: int, left: int, closes: str
) -> None:
    """As `head` does, or a shell that closes an output."""
    for name in ("1", "2"):
        redis.set(f"{prefix}{name}", token_of_the_dead(), px=600_000)
    ours, theirs = os.pipe()
    os.close(ours)
    program = f"{sys.executable} -m only_one --redis {redis_url} --prefix {prefix} {command} {closes}"
    ran = subprocess.run(["/bin/sh", "-c", program], stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    assert (ran.returncode, len(redis.keys(f"{prefix}*"))) == (status, left)


def test_a_cluster_that_is_down(capsys: Out) -> None:
    with configure(redis=lambda: RedisCluster.from_url(CLOSED)):
        for arguments in (["list"], ["show", "k"], ["release", "--dead"]):
            assert main(arguments) == 2
            assert "RedisClusterException" in capsys.readouterr().err


def test_neither_a_run_nor_the_program_needs_celery_and_it_spells_out_what_the_terminal_cannot_show(
    redis: Redis, redis_url: str, prefix: str
) -> None:
    redis.set(f"{prefix}ü", "x")
    alone = "import sys; sys.modules['click'] = None; from only_one import only_one; only_one('run')(sorted)([])"
    program = f"{alone}; from only_one.__main__ import main; sys.exit(main() or 'celery' in sys.modules)"
    environment = {**os.environ, "ONLY_ONE_REDIS_URL": redis_url, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", program, "--prefix", prefix, "list", "--match", "[^k]*"]
    redis.set(f"{prefix}k", "x")
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [line.split("\t")[0] for line in ran.stdout.splitlines()]
    assert (ran.returncode, rows) == (0, [f"{prefix}\\xfc"]), ran.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["release"], 2, "--dead"),
        (["release", "--dead", "k"], 2, "--dead"),
        (["release", "--dead", "--queued", "1h"], 2, "--queued"),
        (["--redis", "nowhere", "list"], 2, "write redis://"),
        (["--redis", "redis://127.0.0.1:1/0", "list"], 2, "ConnectionError of 127.0.0.1:1: Error 111"),
        (["--prefix", "{a}", "list"], 2, "without braces"),
        (["list", "--forever"], 2, "usage: python -m only_one"),
        *((["release", "--queued", time], 2, "600, 90m, 2h or 1d") for time in ("old", "", "h", "nan", "1.h.", "2w")),
        (["list", "--match", "a*"], 0, "no key is like {prefix}a* in database 0 of {server}\n"),
        (["list", "--match", "\udcff*"], 2, "UnicodeEncodeError"),
        (["list", "--json"], 0, ""),
        (["show", "\\ud800"], 2, "UnicodeEncodeError"),
        (["show", "k\x1b"], 1, "k\\x1b is free, with the prefix {prefix} in database 0 of {server}\n"),
        (["--prefix", "\x1b:", "show", "k"], 1, "k is free, with the prefix \\x1b: in database 0 of {server}\n"),
        (["release", "--dead"], 0, "no key of a dead process is held, and none was freed\n"),
        (["release", "--queued", "1h"], 0, "no key of a task that is queued for so long is held, and none was freed\n"),
    ],
)
def test_wrong_use_and_nothing_to_do_are_said(
    redis_url: str, prefix: str, arguments: list[str], status: int, words: str, capsys: Out
) -> None:
    words = words.format(prefix=prefix, server=urlsplit(redis_url).netloc)
    try:
        ended = main(arguments)
    except SystemExit as error:
        ended = int(error.code or 0)
    assert ended == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err if status else shown.err == words


def test_the_celery_command_has_the_settings_of_its_app(
    redis: Redis, redis_url: str, prefix: str, tmp_path: Path
) -> None:
    app = f"from celery import Celery; app = Celery('cli_app', broker='{redis_url}')"
    (tmp_path / "cli_app.py").write_text(f"{app}; app.conf.only_one_prefix = '{prefix}'")
    for key in ("a", "-x"):
        store(redis, f"{prefix}{key}")

    def celery(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "celery", "-A", "cli_app", "only-one", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    freed = celery("release", "--", "a", "-x", "b")
    words = [line.partition(",")[0] for line in freed.stdout.splitlines()]
    assert (freed.returncode, words) == (1, [f"{prefix}a was freed", f"{prefix}-x was freed"]), freed.stderr
    assert not redis.keys(f"{prefix}*")
    assert "usage: celery only-one" in celery("--help").stdout
