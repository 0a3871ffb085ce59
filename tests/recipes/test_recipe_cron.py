"""The scripts of docs/recipes/cron.md, copied into an empty folder and started as cron does it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from redis import Redis

from only_one.lock.holder import Holder
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.lock.test_holder import CONTAINER, in_container

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes" / "cron.md").read_text()
REPORT = [sys.executable, "nightly_report.py"]
BILL = [sys.executable, "two_hosts.py", "outbox"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_server() as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[Redis]:
    with Redis.from_url(url) as found:
        found.flushdb()
        yield found


@pytest.fixture
def folder(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a user has copied from the page, and where he is."""
    for name in ("nightly_report.py", "two_hosts.py"):
        shutil.copy(ROOT / "examples" / "cron" / name, tmp_path)
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", url)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Start a script as cron does, without anything on standard input, and wait for its end."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=LIMIT)


def on(host: str) -> list[str]:
    """What starts a script on another host: with other process ids, and another name."""
    assert CONTAINER is not None
    return [*CONTAINER, "sh", "-c", 'hostname "$0" && exec "$@"', host]


@pytest.mark.usefixtures("folder")
def test_a_run_that_goes_on_is_not_joined_by_another(client: Redis) -> None:
    with subprocess.Popen(REPORT, stdin=subprocess.PIPE) as waiting:
        assert eventually(lambda: client.exists("only_one:nightly-report") or waiting.poll() is not None)
        holder = Holder.parse(client.get("only_one:nightly-report") or b"")
        assert holder is not None
        second = start(REPORT)
        waiting.kill()
    assert (second.returncode, second.stdout) == (75, "")
    skip = second.stderr.splitlines()[-1]
    shown = next(line for line in PAGE.splitlines() if " did not run: " in line)
    assert as_shown(skip) == as_shown(shown)
    assert f"pid {waiting.pid} on {holder.host}, running for" in skip

    # The first one was killed while it had its key, which holds up nobody.
    third = start([*REPORT, str(orders())])
    assert (third.returncode, third.stdout.split()) == (0, ["7", "tea", "5", "coffee"]), third.stderr
    assert not client.exists("only_one:nightly-report")


def orders() -> Path:
    """The orders of a day."""
    path = Path("orders.txt")
    path.write_text("tea 3\ncoffee 5\ntea 4\n")
    return path


def as_shown(line: str) -> str:
    """A line of the log without what is another each time: when, who, where and for how long."""
    return re.sub(r"\d+", "0", re.sub(r" on \S+,", " on a host,", line))


@pytest.mark.usefixtures("client")
def test_the_line_of_the_crontab(folder: Path) -> None:
    orders()
    (line,) = re.findall(r"(?m)^0 3 \* \* \* (.*)$", PAGE)
    command = line.replace("/srv/reports", shlex.quote(str(folder))).replace(".venv/bin/python", REPORT[0])
    assert start(["sh", "-c", command]).returncode == 0
    assert (folder / "report.txt").read_text().split() == ["7", "tea", "5", "coffee"]
    assert "did not run" not in (folder / "report.log").read_text()


@pytest.mark.usefixtures("folder")
def test_a_server_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONLY_ONE_REDIS_URL", "redis://127.0.0.1:1/0")
    done = start(REPORT)
    assert done.returncode == 1
    assert "LockUnavailable" in done.stderr.splitlines()[-1]


@in_container
def test_one_host_of_two_runs_per_tick(client: Redis, folder: Path) -> None:
    first = start([*on("first"), *BILL])
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    second = start([*on("second"), *BILL])
    assert (second.returncode, second.stdout) == (0, "")
    assert " on first, kept for " in second.stderr
    assert (folder / "outbox").read_text() == "bill of the day\n"
    assert 0 < client.pttl("only_one:send-bill") <= 30 * 60 * 1000

    client.pexpire("only_one:send-bill", 1)  # the next tick
    assert eventually(lambda: not client.exists("only_one:send-bill"))
    assert start([*on("second"), *BILL]).returncode == 0
    assert (folder / "outbox").read_text() == "bill of the day\n" * 2


@in_container
@pytest.mark.usefixtures("client")
def test_two_hosts_whose_clocks_agree(folder: Path) -> None:
    both = [subprocess.Popen([*on(host), *BILL]) for host in ("first", "second")]
    assert [each.wait(LIMIT) for each in both] == [0, 0]
    assert (folder / "outbox").read_text() == "bill of the day\n"


@in_container
@pytest.mark.usefixtures("client")
def test_without_at_least_the_other_host_does_it_again(folder: Path) -> None:
    script = folder / "two_hosts.py"
    text = script.read_text()
    script.write_text(text.replace(", at_least=30 * 60", ""))
    assert script.read_text() != text
    for host in ("first", "second"):
        assert start([*on(host), *BILL]).returncode == 0
    assert (folder / "outbox").read_text() == "bill of the day\n" * 2
