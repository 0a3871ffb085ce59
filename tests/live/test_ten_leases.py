"""Runs that are ten leases long, whatever they do and wherever, while others call for their keys all the time."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis as redis_py

from only_one.holder import Holder
from only_one.testing import Guarded, redis_server
from rigs.waiting import eventually
from tests.live.ten_leases_app import LEASE, LEASES, app, task
from tests.live.workers import ROOT, MarkerUpdate, Witness, celery_worker, environment, sender

if TYPE_CHECKING:
    from typing_extensions import Self

pytest.importorskip("gevent")

APP = "tests.live.ten_leases_app"
PREFIX = "only_one:"

# Those who compute have a core each.
TOGETHER = [
    ["threads IO", "asyncio IO", "prefork IO", "gevent IO", "threads CPU", "prefork CPU"],
    ["asyncio CPU", "gevent CPU"],
]
POOLS = {"prefork": 4, "gevent": 10}
HEAD = ["kind", "work", "leases", "contending calls", "looks", "overlaps", "key gone", "ended"]


def lines_of(witness: Witness, key: str) -> list[MarkerUpdate]:
    """What the runs of one key have written down."""
    return witness.notes(*key.split())


def overlaps_of(witness: Witness, key: str) -> int:
    """How often a run started while another had not ended."""
    running = overlaps = 0
    for line in lines_of(witness, key):
        is_start = line.rest == ["start"]
        overlaps += is_start and running > 0
        running += 1 if is_start else -1
    return overlaps


class Watch:
    """Looks at keys all the time, and sees whether they stay what they are until their first run has ended."""

    def __init__(self, url: str, witness: Witness, keys: list[str]) -> None:
        self.values: dict[str, bytes] = {}
        self.looks = dict.fromkeys(keys, 0)
        self.gone = dict.fromkeys(keys, 0)
        self._url = url
        self._witness = witness
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(keys,))

    def _watch(self, keys: list[str]) -> None:
        with redis_py.Redis.from_url(self._url) as client:
            while not self._ended.wait(0.005):
                begun = [key for key in keys if lines_of(self._witness, key)]
                found = client.mget([PREFIX + key for key in begun]) if begun else []
                for key, value in zip(begun, found, strict=True):
                    # Read before the key was and after: what had begun then, and has not ended by now.
                    if len(lines_of(self._witness, key)) == 1:
                        self.looks[key] += 1
                        self.gone[key] += value != self.values.setdefault(key, value or b"")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def begin(key: str, environment: dict[str, str], stack: ExitStack) -> None:
    """Have a run begin where it belongs."""
    where, _, _ = key.partition(" ")
    if where in POOLS:
        # The second is skipped; a greenlet that computes would have it wait until the first has ended.
        for _ in range(1 if key == "gevent CPU" else 2):
            task.apply_async([key], queue=where)
    else:
        stack.enter_context(Guarded([sys.executable, "-m", APP, where, key], cwd=ROOT, env=environment))


def row(key: str, witness: Witness, watch: Watch, calls: int) -> list[Any]:
    """What has been seen of one combination."""
    start, end, *_ = lines_of(witness, key)
    leases = round((end.at - start.at) / LEASE, 1)
    return [*key.split(), leases, calls, watch.looks[key], overlaps_of(witness, key), watch.gone[key], *end.rest]


def show(rows: list[list[Any]]) -> None:
    for each in [HEAD, *rows]:
        print(" | ".join(f"{word!s:>{len(title)}}" for word, title in zip(each, HEAD, strict=True)))


@pytest.mark.soak
def test_nothing_overlaps_and_no_key_is_lost(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    rows: list[list[Any]] = []
    witness = Witness(tmp_path / "witness")
    with redis_server() as server, sender(app, server.url), ExitStack() as workers:
        env = environment(server.url, witness.path)
        for pool, size in POOLS.items():
            options = ["-Q", pool, "-n", f"{pool}@%h"]
            workers.enter_context(celery_worker(APP, tmp_path / pool, env, *options, pool=pool, size=size))
        for keys in TOGETHER:
            with Watch(server.url, witness, keys) as watch, ExitStack() as stack:
                for key in keys:
                    begin(key, env, stack)
                assert eventually(lambda keys=keys: all(lines_of(witness, key) for key in keys))  # type: ignore[misc]
                contend = [sys.executable, "-m", APP, "contend", *keys]
                others = Guarded(contend, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
                stack.enter_context(others)
                assert others.stdout is not None
                counts = others.stdout.readline().split()
            rows += [row(key, witness, watch, int(calls)) for key, calls in zip(keys, counts, strict=True)]
            for key in keys:
                holder = Holder.parse(watch.values[key])
                assert holder is not None
                assert holder.pid == lines_of(witness, key)[0].pid, key
    show(rows)
    for name, total in zip(HEAD[3:7], map(sum, list(zip(*rows, strict=True))[3:7]), strict=True):
        record_property(name, total)
    record_property("leases, at the least", min(row[2] for row in rows))
    for kind, work, leases, calls, looks, overlaps, gone, ended in rows:
        where = f"{kind} {work}"
        assert overlaps == 0, where
        assert gone == 0, where
        assert ended == "end", where
        assert leases >= LEASES, where
        assert calls > 10 * LEASES, where
        assert looks > 10 * LEASES, where
        # The run, and one of those who had called for its key.
        assert [line.rest for line in lines_of(witness, where)] == [["start"], ["end"]] * 2, where
    assert len(rows) == 8
