"""Real workers for the live tests, what their runs write down, and what the server says of its keys, with times.

All moments are those of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from uuid import uuid4

import redis
from celery import Celery
from celery._state import get_current_app

from only_one.testing import Guarded, RedisServer, guarded, redis_server
from tests.live.crew import leave
from tests.waiting import LIMIT, eventually

ROOT = Path(__file__).parents[2]

PREFIX = "live:"
URL = "LIVE_URL"
RESULTS = "LIVE_RESULTS"
WITNESS = "LIVE_WITNESS"
KEYSPACE = "__keyspace@0__:"


class Event(NamedTuple):
    """Something that happened to a key of the server."""

    at: float
    what: str


class Note(NamedTuple):
    """A line that a run has written."""

    at: float
    pid: int
    rest: list[str]


def note(word: str, gate: str, *rest: object) -> None:
    """Append a line to the witness's file, which other processes do, too; it does not use the lock."""
    line = " ".join(map(str, [word, gate, time.monotonic(), os.getpid(), *rest]))
    with Path(os.environ[WITNESS]).open("ab", buffering=0) as file:
        file.write(line.encode() + b"\n")


class World:
    """A server that is watched, and workers on it.

    Attributes:
        server: the broker, the result backend, and where the keys are.
        client: a client of it.
    """

    def __init__(self, server: RedisServer, client: Any, app: Celery, module: str, folder: Path) -> None:
        self.server, self.client = server, client
        self._app, self._module, self._folder = app, module, folder
        self._events: list[tuple[float, str, str]] = []
        self._logs: list[Path] = []
        self._subscription = client.pubsub(ignore_subscribe_messages=True)
        self._subscription.psubscribe(f"{KEYSPACE}*")
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()
        assert eventually(lambda: client.pubsub_numpat() == 1)

    def _listen(self) -> None:
        for message in self._subscription.listen():
            key = message["channel"].decode().removeprefix(KEYSPACE)
            self._events.append((time.monotonic(), key, message["data"].decode()))

    def close(self) -> None:
        """Stop watching."""
        self._subscription.punsubscribe()
        self._thread.join(LIMIT)
        self._subscription.close()

    @contextmanager
    def worker(self, *arguments: str, inside: Sequence[str] = (), **environment: str) -> Iterator[Guarded]:
        """A worker of several processes, until the end of the block."""
        log = self._folder / f"log-{len(self._logs)}"
        self._logs.append(log)
        command = [*inside, sys.executable, "-m", "celery", "-A", self._module, "worker", "--pool", "prefork"]
        quiet = ["--without-gossip", "--without-mingle", "-l", "INFO"]
        with log.open("wb") as output:
            env = {**os.environ, **self.environment, **environment}
            command += [*quiet, "-n", f"{log.name}@%h", *arguments]
            with guarded(command, cwd=ROOT, env=env, stdout=output, stderr=output) as process:
                assert eventually(lambda: b" ready." in log.read_bytes() or process.poll() is not None, LIMIT)
                assert process.poll() is None, self.log()
                yield process

    @property
    def environment(self) -> dict[str, str]:
        """What workers, and others that are started for a test, are told."""
        return {URL: self.server.url, RESULTS: self.server.url, WITNESS: str(self._witness)}

    @property
    def _witness(self) -> Path:
        return self._folder / "witness"

    def log(self) -> str:
        """What the workers have said."""
        return "\n".join(path.read_text(errors="replace") for path in self._logs)

    def notes(self, word: str, gate: str) -> list[Note]:
        """What runs have written down, of one kind."""
        lines = self._witness.read_text().splitlines() if self._witness.exists() else []
        split = [line.split(" ") for line in lines]
        return [Note(float(at), int(pid), rest) for head, its, at, pid, *rest in split if (head, its) == (word, gate)]

    def wait_for(self, word: str, gate: str, times: int = 1, limit: float = LIMIT) -> Note:
        """The so-manieth note of a kind, which is waited for."""
        assert eventually(lambda: len(self.notes(word, gate)) >= times, limit), f"no {times} {word} of {gate}"
        return self.notes(word, gate)[times - 1]

    def events(self, key: str, since: float = 0.0) -> list[Event]:
        """What has happened to a key of ours (or, with a slash before it, to any) since a moment."""
        name = key[1:] if key.startswith("/") else PREFIX + key
        return [Event(at, what) for at, its, what in list(self._events) if its == name and at >= since]

    def wait_for_event(self, key: str, *what: str, since: float, limit: float = LIMIT) -> Event:
        """The first event of a kind since a moment, which is waited for."""

        def found() -> list[Event]:
            return [event for event in self.events(key, since) if event.what in what]

        assert eventually(found, limit), f"no {what} of {key}: {self.events(key)}"
        return found()[0]

    def catch_up(self) -> None:
        """Wait until all that has happened to keys by now is known."""
        marker = f"marker-{uuid4().hex}"
        self.client.set(f"{PREFIX}{marker}", 1)
        self.client.delete(f"{PREFIX}{marker}")
        self.wait_for_event(marker, "del", since=0)

    def copy_of(self, task_id: str) -> str:
        """The message of a task that was delivered and is not acknowledged, as the broker keeps it."""
        found: list[str] = []

        def is_found() -> bool:
            kept = [raw.decode() for raw in self.client.hvals("unacked")]
            found[:] = [raw for raw in kept if json.loads(raw)[0]["headers"]["id"] == task_id]
            return bool(found)

        assert eventually(is_found), f"no message of {task_id}"
        return found[0]

    def deliver_again(self, copy: str) -> None:
        """Have the broker deliver a message once more, as it does when its visibility timeout is over."""
        # Under a name of its own, which no worker removes in between as it acknowledges the message.
        name = f"copy-{uuid4().hex}"
        self.client.hset("unacked", name, copy)
        with self._app.connection_for_write() as connection:
            connection.default_channel.qos.restore_by_tag(name)

    def is_held(self, key: str) -> bool:
        """Whether a key of ours is there."""
        return bool(self.client.exists(PREFIX + key))

    def keys(self) -> list[str]:
        """The keys of ours that are there, and what is beside them."""
        return sorted(name.decode() for name in self.client.scan_iter(f"*{PREFIX}*"))

    def keys_of_runs(self) -> list[str]:
        """The keys of ours that are there, without what is remembered of copies."""
        return [key for key in self.keys() if key.startswith(PREFIX)]


@contextmanager
def world(app: Celery, name: str, folder: Path, *options: str) -> Iterator[World]:
    """A server that is watched; the application of this process sends to it.

    Args:
        app: the application.
        name: its module, for workers.
        folder: where they write.
        options: more options of the server.
    """
    with (
        redis_server("--notify-keyspace-events", "KEA", *options) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        brief = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}}
        app.conf.update(broker_url=server.url, result_backend=server.url, result_backend_transport_options=brief)
        found = World(server, client, app, name, folder)
        before = get_current_app()
        app.set_current()
        try:
            yield found
        finally:
            before.set_current()
            print(found.log())
            found.close()
            leave(app)


def kill_tree(worker: Guarded) -> None:
    """End a worker and its children by SIGKILL, all at once."""
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait(LIMIT)
