"""Real workers for the live tests, what their runs write down, and what the server says of its keys, with times.

All moments are those of the monotonic clock, which the processes of one machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import redis
from celery import Celery
from celery._state import get_current_app

from only_one.holder import Holder
from rigs import programs
from rigs.programs import Logged
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.live.brokers import KIND, Broker
from tests.live.brokers import broker as broker_of

ROOT = Path(__file__).parents[2]

APP = "tests.live.app"
PREFIX = "live:"
URL = "LIVE_URL"
BROKER = "LIVE_BROKER"
SETTINGS = "LIVE_SETTINGS"
WITNESS = "LIVE_WITNESS"
KEYSPACE = "__keyspace@0__:"

# Results and messages that are sent when the server is gone would try for 20 s each to say so.
BRIEF = {"retry_policy": {"max_retries": 1, "interval_start": 0, "interval_step": 0}}


class Note(NamedTuple):
    """A line that a run has written."""

    at: float
    pid: int
    rest: list[str]


def note(*words: object) -> None:
    """Append a line to the witness's file, which other processes do, too."""
    Witness(Path(os.environ[WITNESS])).append(*words)


def wait_at(gate: str) -> None:
    """Wait until somebody lets one run pass this gate: for longer than any test waits for anything.

    Raises:
        TimeoutError: if nobody does.
    """
    with redis.Redis.from_url(os.environ[URL], socket_timeout=None) as client:
        if client.blpop([gate], timeout=10 * LIMIT) is None:
            raise TimeoutError(gate)


class Witness:
    """The file in which runs write down what they do, in the order in which they do it; it does not use the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *words: object) -> None:
        """Write one line."""
        line = " ".join(map(str, [time.monotonic(), os.getpid(), *words]))
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")

    def notes(self, *head: str) -> list[Note]:
        """The lines that begin with these words, without them."""
        text = self.path.read_text() if self.path.exists() else ""
        lines = [line.split() for line in text.split("\n")[:-1]]  # the last one may be being written
        return [
            Note(float(at), int(pid), words[len(head) :])
            for at, pid, *words in lines
            if words[: len(head)] == list(head)
        ]


@contextmanager
def celery_worker(
    application: str,
    log: Path,
    env: dict[str, str],
    *options: str,
    pool: str = "prefork",
    size: int = 3,
    folder: str = str(ROOT),
) -> Iterator[Logged]:
    """Run a worker for the length of a `with` block; its log is printed at the end.

    Args:
        application: the module of its tasks.
        log: the file for what it says.
        env: what it is told.
        options: more of its command line.
        pool: its kind of pool.
        size: of the pool.
        folder: that of the code.
    """
    process = Logged(programs.celery_worker(application, *options, pool=pool, size=size), log, cwd=folder, env=env)
    try:
        with process:
            process.wait_until_ready()
            yield process
    finally:
        print(process.text[-20_000:])


def leave(app: Any) -> None:
    """Let go of an application's server, and close what Celery leaves open: its pool, and what results have opened."""
    app.pool.force_close_all(close_pool=False)
    app.backend.result_consumer.stop()
    app.backend.result_consumer._pubsub = None  # or a result that is collected connects once more, to say so
    app.backend.client.connection_pool.disconnect()
    app.close()
    # These have the pool and the server's address, too: who sends after this would wait for a connection for ever.
    vars(app).pop("amqp", None)
    vars(app).pop("only_one_broker", None)
    vars(app._local).pop("backend", None)


@contextmanager
def sender(app: Any, url: str, **settings: Any) -> Iterator[None]:
    """Let this process send an application's tasks for the length of a `with` block."""
    ours = {"broker_url": url, "result_backend": url, "result_backend_transport_options": BRIEF, **settings}
    others = {name: app.conf[name] for name in ours}
    app.conf.update(ours)
    before = get_current_app()
    app.set_current()
    try:
        yield
    finally:
        before.set_current()
        leave(app)
        app.conf.update(others)


class World:
    """A server that is watched, a broker, which it may be itself, and workers.

    Attributes:
        server: the result backend, and where the keys are.
        client: a client of it.
        broker: where messages are.
        witness: the file in which runs write.
        environment: what workers, and others that are started for a test, are told.
    """

    def __init__(self, server: RedisServer, client: Any, broker: Broker, folder: Path, settings: Any) -> None:
        self.server, self.client, self.broker = server, client, broker
        self._folder = folder
        self._events: list[tuple[float, str, str]] = []
        self._logs: list[Path] = []
        self.witness = Witness(folder / "witness")
        told = {URL: server.url, BROKER: broker.url, SETTINGS: json.dumps(settings), WITNESS: str(self.witness.path)}
        self.environment = {**os.environ, **told, "C_FORCE_ROOT": "1"}  # else Celery accepts no pickle as root
        self._subscription = client.pubsub(ignore_subscribe_messages=True)
        self._subscription.psubscribe(**{f"{KEYSPACE}*": self._listen})
        self._thread = self._subscription.run_in_thread(sleep_time=0.1, daemon=True)
        assert eventually(lambda: client.pubsub_numpat() == 1)

    def _listen(self, message: Any) -> None:
        key = message["channel"].decode().removeprefix(KEYSPACE)
        self._events.append((time.monotonic(), key, message["data"].decode()))

    def close(self) -> None:
        """Stop watching."""
        self._thread.stop()
        self._thread.join(LIMIT)

    @contextmanager
    def worker(
        self, *arguments: str, module: str = APP, folder: str = str(ROOT), pool: str = "prefork", **more: str
    ) -> Iterator[Logged]:
        """A worker, until the end of the block.

        Args:
            arguments: more of its command line.
            module: that of its tasks.
            folder: that of the code.
            pool: its kind of pool.
            more: what it is told besides.
        """
        log = self._folder / f"log-{len(self._logs)}"
        self._logs.append(log)
        name = ["-n", f"{log.name}@%h"]
        env = {**self.environment, **more}
        with celery_worker(module, log, env, *name, *arguments, pool=pool, folder=folder) as process:
            yield process
            # A warm shutdown takes two seconds, in which nothing is looked at but by `make coverage`.
            if process.poll() is None and "COVERAGE_PROCESS_CONFIG" not in os.environ:
                process.kill_all()

    def log(self) -> str:
        """What the workers have said."""
        return "\n".join(path.read_text(errors="replace") for path in self._logs)

    def received(self, task_id: str) -> int:
        """How often workers have received a task."""
        return self.log().count(f"[{task_id}] received")

    def notes(self, word: str, key: str) -> list[Note]:
        """What runs have written down, of one kind."""
        return self.witness.notes(word, key)

    def wait_for(self, word: str, key: str, times: int = 1) -> Note:
        """The so-manieth note of a kind, which is waited for."""
        assert eventually(lambda: len(self.notes(word, key)) >= times), f"no {times} {word} of {key}"
        return self.notes(word, key)[times - 1]

    def events(self, key: str) -> list[str]:
        """What has happened to a key of ours (or, with a slash before it, to any)."""
        return [what for _, what in self._happened_to(key)]

    def _happened_to(self, key: str) -> list[tuple[float, str]]:
        name = key[1:] if key.startswith("/") else PREFIX + key
        return [(at, what) for at, its, what in list(self._events) if its == name]

    def wait_for_event(self, key: str, what: str) -> float:
        """When an event of a kind happened first, which is waited for."""
        assert eventually(lambda: what in self.events(key)), f"no {what} of {key}: {self.events(key)}"
        return next(at for at, its in self._happened_to(key) if its == what)

    def catch_up(self) -> None:
        """Wait until all that has happened to keys by now is known."""
        marker = f"marker-{uuid4().hex}"
        self.client.set(f"{PREFIX}{marker}", 1)
        self.client.delete(f"{PREFIX}{marker}")
        self.wait_for_event(marker, "del")

    def no_key_is_left(self) -> bool:
        """Whether all keys come to be free."""
        return eventually(lambda: not list(self.client.scan_iter(f"{PREFIX}*")))


class Scene:
    """A key of a test's own, with its gate, and a queue that no worker reads."""

    def __init__(self, place: World) -> None:
        self.place = place
        self.key = f"key-{uuid4().hex}"
        self.queue = f"queue-{self.key}"

    def consume(self) -> None:
        """Have the worker take what is in this test's queue, if it has not expired."""
        self.place.broker.move(self.queue, "celery")

    def open(self, times: int = 1) -> None:
        """Let so many runs go on."""
        self.place.client.rpush(f"gate:{self.key}", *range(times))

    def begun(self, times: int = 1) -> Note:
        """The begin of a run, which is waited for."""
        return self.place.wait_for("begin", self.key, times)

    def holder(self) -> Holder | None:
        """Who has the key."""
        return Holder.parse(self.place.client.get(PREFIX + self.key) or b"")

    def state(self) -> tuple[str, str | None] | None:
        """The state of the key, and the id of its task; None if it is free."""
        holder = self.holder()
        return (holder.state, holder.task_id) if holder else None

    def expires_in(self) -> float:
        """For how many seconds the key is there."""
        return float(self.place.client.pttl(PREFIX + self.key)) / 1000

    def take(self, value: Any = "somebody else") -> None:
        """Somebody else has the key from now on."""
        self.place.client.set(PREFIX + self.key, value)

    def free(self) -> None:
        """And releases it."""
        assert self.place.client.delete(PREFIX + self.key)

    def is_held(self) -> bool:
        return bool(self.place.client.exists(PREFIX + self.key))

    def is_free(self) -> bool:
        """Whether the key is free, or comes to be."""
        return eventually(lambda: not self.is_held())

    def keys(self) -> list[str]:
        """What is left of this test: its keys, and what is stored beside them and does not expire."""
        names = [name.decode() for name in self.place.client.scan_iter(f"*{PREFIX}{self.key}*")]
        return [name for name in names if name.startswith(PREFIX) or self.place.client.ttl(name) == -1]

    def runs(self) -> list[str]:
        """The attempts that have run and have ended, none of them beside another."""
        begins, ends = self.place.notes("begin", self.key), self.place.notes("end", self.key)
        assert len(begins) == len(ends)
        assert all(end.at <= begin.at for end, begin in zip(ends, begins[1:], strict=False)), "beside each other"
        return [each.rest[0] for each in begins]

    def events(self) -> list[str]:
        """What has happened to the key until now."""
        self.place.catch_up()
        return [event for event in self.place.events(self.key) if event != "expire"]

    def gaps(self) -> int:
        """How often the key came to be free."""
        return len([event for event in self.events() if event in {"del", "expired"}])


@contextmanager
def world(app: Celery, folder: Path, kind: str = KIND, **settings: Any) -> Iterator[World]:
    """A server that is watched; the application of this process sends to it.

    Args:
        app: the application.
        folder: where workers write.
        kind: of the broker.
        settings: the application's, here and in workers.
    """
    with (
        redis_server("--notify-keyspace-events", "KEA") as server,
        redis.Redis.from_url(server.url) as client,
        broker_of(client, server.url, app, kind) as broker,
        sender(app, server.url, **{**settings, "broker_url": broker.url, **broker.settings}),
        closing(World(server, client, broker, folder, settings)) as found,
    ):
        yield found


def answered(command: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
    """Whether a worker answers a command; it is told again, as a worker that has just come up may not listen yet."""
    return eventually(lambda: command(*arguments, **options, reply=True, timeout=LIMIT / 20, limit=1))
