"""Covered Celery tasks on a real worker with several processes, and a real broker and result backend."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis

from only_one import ConfigurationError
from only_one.holder import Holder
from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.brokers import broker as broker_of
from tests.live.workers import BROKER, PREFIX, Witness, celery_worker, environment, sender

COPIES = 6


class Worker:
    """A worker with several processes, and what has been seen of its runs.

    Attributes:
        client: a client of its server.
    """

    def __init__(self, client: Any, witness: Witness, log: Path) -> None:
        self.client = client
        self._witness = witness
        self._log = log

    def lines(self, word: str, gate: str) -> list[str]:
        """What runs have written down, of one kind."""
        return [" ".join(rest) for rest in self._witness.lines(word, gate)]

    def skips(self, gate: str) -> int:
        """How many tasks did not run, because another with this gate did."""
        return sum("did not run" in line and gate in line for line in self._log.read_text().splitlines())

    def wait_until_begun(self, gate: str, times: int = 1) -> None:
        """Wait until so many runs have begun."""
        assert eventually(lambda: len(self.lines("begin", gate)) >= times, LIMIT)

    def open(self, gate: str, times: int = 1) -> None:
        """Let so many runs go on."""
        self.client.rpush(gate, *range(times))

    def holder(self, key: str) -> Holder | None:
        """Who holds a key."""
        value = self.client.get(PREFIX + key)
        return None if value is None else Holder.parse(value)

    def no_key_is_left(self) -> bool:
        """Whether all keys have been given back."""
        return eventually(lambda: not list(self.client.scan_iter(f"{PREFIX}*")))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    witness, log = Witness(folder / "witness"), folder / "log"
    with (
        redis_server() as server,
        redis.Redis.from_url(server.url) as client,
        broker_of(client, server.url, live.app) as broker,
        sender(live.app, server.url, broker_url=broker.url, **broker.settings),
        celery_worker("tests.live.app", log, environment(server.url, witness.path, **{BROKER: broker.url}), size=4),
    ):
        yield Worker(client, witness, log)


@pytest.fixture
def gate() -> str:
    return f"gate-{uuid4()}"


@pytest.fixture(autouse=True)
def nothing_is_left(worker: Worker) -> Iterator[None]:
    """After each test all keys are free."""
    yield
    assert worker.no_key_is_left()


def result(answer: Any) -> Any:
    """What a task has returned, or raised."""
    return answer.get(timeout=LIMIT)


TASKS = {
    "plain": (live.plain, "tests.live.app.plain:{gate}"),
    "bound": (live.bound, None),
    "shared": (live.shared, "tests.live.app.shared:{gate}"),
    "bound and shared": (live.bound_and_shared, "a shared name:{gate}"),
    "named": (live.named, "a name of its own:{gate}"),
    "SingleTask": (live.single_task, "SingleTask"),
    "class with a name": (live.named_task, "another name:{gate}:0"),
}


@pytest.mark.parametrize(("task", "key"), TASKS.values(), ids=TASKS)
def test_duplicates_in_flight_are_skipped(worker: Worker, gate: str, task: Any, key: str | None) -> None:
    answers = [task.delay(gate) for _ in range(COPIES)]
    assert eventually(lambda: sum(answer.ready() for answer in answers) == COPIES - 1, LIMIT)
    late = [task.delay(gate), task.apply_async(kwargs={"gate": gate})]
    answers += late
    assert [result(answer) for answer in late] == [None, None]

    (running,) = [answer for answer in answers if not answer.ready()]
    assert len(worker.lines("begin", gate)) == 1
    keys = [name.decode().removeprefix(PREFIX) for name in worker.client.scan_iter(f"{PREFIX}*")]
    if key is None:
        assert len(keys) == 1
        assert keys[0].startswith(f"{task.name}:")
    else:
        assert keys == [key.format(gate=gate)]
    holder = worker.holder(keys[0])
    assert holder is not None
    assert (holder.name, holder.task_id, holder.attempt) == (task.name, running.id, 0)
    assert worker.lines("begin", gate) == [str(holder.pid)]

    worker.open(gate)
    found = result(running)
    assert (found["key"], found["name"], found["id"], found["held"]) == (PREFIX + keys[0], task.name, running.id, True)
    assert len(worker.lines("begin", gate)) == len(worker.lines("end", gate)) == 1
    assert [answer.state for answer in answers] == ["SUCCESS"] * len(answers)
    assert [answer.result for answer in answers if answer is not running] == [None] * (len(answers) - 1)


def test_the_next_one_runs(worker: Worker, gate: str) -> None:
    for number in range(1, 4):
        answer = live.plain.delay(gate)
        worker.open(gate)
        assert result(answer)["id"] == answer.id
        assert len(worker.lines("end", gate)) == number


def test_other_arguments_are_another_key(worker: Worker, gate: str) -> None:
    for number, task in enumerate((live.bound, live.named_task), 1):
        answers = [task.delay(gate), task.delay(gate, 1), task.delay(gate, extra=2)]
        worker.wait_until_begun(gate, 3 * number)
        skipped = [task.delay(gate, 0), task.delay(gate, extra=1), task.delay(extra=2, gate=gate)]
        assert [result(answer) for answer in skipped] == [None] * 3
        worker.open(gate, 3)
        assert [result(answer)["extra"] for answer in answers] == [0, 1, 2]


def test_what_is_not_in_the_key_does_not_count(worker: Worker, gate: str) -> None:
    answer = live.plain.delay(gate, extra=1)
    worker.wait_until_begun(gate)
    assert result(live.plain.delay(gate, extra=2)) is None
    assert result(live.plain.delay(gate, 3)) is None
    worker.open(gate)
    assert result(answer)["extra"] == 1


def test_a_bound_task_gets_itself(worker: Worker, gate: str) -> None:
    answer = live.bound.delay(gate)
    worker.open(gate)
    assert result(answer)["own id"] == result(answer)["id"] == answer.id


def test_results_that_are_ignored(worker: Worker, gate: str) -> None:
    answers = [live.silent.delay(gate) for _ in range(COPIES)]
    worker.wait_until_begun(gate)
    assert eventually(lambda: worker.skips(gate) == COPIES - 1, LIMIT)
    worker.open(gate)
    assert eventually(lambda: worker.lines("end", gate), LIMIT)
    assert worker.no_key_is_left()
    assert len(worker.lines("begin", gate)) == 1
    assert not worker.client.exists(*[f"celery-task-meta-{answer.id}" for answer in answers])


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("arguments", "options"),
    [((), {}), (("a", 1, 2), {}), ((), {"gate": "a", "unknown": 1}), (("a",), {"gate": "a"})],
    ids=["too few", "too many", "unknown", "twice"],
)
@pytest.mark.parametrize("task", [live.plain, live.bound, live.shared], ids=["plain", "bound", "shared"])
def test_wrong_arguments_raise_where_the_task_is_sent(task: Any, arguments: Any, options: Any) -> None:
    with pytest.raises(TypeError):
        task.delay(*arguments, **options)
    with pytest.raises(TypeError):
        task.apply_async(arguments, options)


def test_an_exception_is_the_tasks_own(worker: Worker, gate: str) -> None:
    answer = live.failing.delay(gate)
    worker.wait_until_begun(gate)
    assert result(live.failing.delay(gate)) is None
    worker.open(gate)
    with pytest.raises(live.Trouble, match=gate):
        result(answer)
    assert answer.state == "FAILURE"
    assert worker.holder(f"tests.live.app.failing:{gate}") is None  # released before the result is stored


def test_an_async_task_is_refused_by_the_worker() -> None:
    """Also where it was sent by name, so that nobody could refuse it before."""
    with pytest.raises(ConfigurationError, match="asyncio"):
        result(live.app.send_task("tests.live.app.awaited_by_nobody"))


def test_a_task_that_celery_retries(worker: Worker, gate: str) -> None:
    answer = live.retried.delay(gate)
    for attempt in range(3):
        worker.wait_until_begun(gate, attempt + 1)
        holder = worker.holder(f"tests.live.app.retried:{gate}")
        assert holder is not None
        assert (holder.task_id, holder.attempt) == (answer.id, attempt)
        assert result(live.retried.delay(gate)) is None
        worker.open(gate)
    assert result(answer) == [2, 2]
    assert worker.lines("attempt", gate) == ["0", "1", "2"]
    assert len(worker.lines("begin", gate)) == 3


@pytest.mark.parametrize("how", ["the task", "its run"])
def test_a_task_that_another_calls_is_a_plain_function(worker: Worker, gate: str, how: str) -> None:
    answer = live.outer.delay(gate, how)
    worker.open(gate)
    found = result(answer)
    assert (found["name"], found["id"], found["attempt"]) == ("tests.live.app.named", None, None)
    assert found["key"] == f"{PREFIX}tests.live.app.named:{gate}"


def test_a_covered_function_in_a_task_is_a_plain_function(worker: Worker, gate: str) -> None:
    worker.open(gate)
    found = result(live.around_a_function.delay(gate))
    assert found["key"] == f"{PREFIX}tests.live.app.function:{gate}"
    assert (found["name"], found["id"], found["attempt"]) == ("tests.live.app.function", None, None)


def test_a_covered_function_in_a_covered_task(worker: Worker, gate: str) -> None:
    worker.open(gate)
    answer = live.nested.delay(gate)
    before, inner, after = result(answer)
    assert before == after
    assert (before["name"], before["id"]) == (live.nested.name, answer.id)
    assert (inner["name"], inner["id"]) == ("tests.live.app.function", None)


def test_a_worker_process_that_is_killed_frees_its_key_within_the_lease(worker: Worker, gate: str) -> None:
    key = f"tests.live.app.plain:{gate}"
    killed = live.plain.delay(gate)
    worker.wait_until_begun(gate)
    holder = worker.holder(key)
    assert holder is not None
    assert result(live.plain.delay(gate)) is None

    os.kill(holder.pid, signal.SIGKILL)
    assert eventually(lambda: worker.holder(key) is None)
    assert worker.lines("end", gate) == []

    answer = live.plain.delay(gate)
    worker.wait_until_begun(gate, 2)
    worker.open(gate)
    assert result(answer)["id"] == answer.id
    assert worker.lines("end", gate) == [worker.lines("begin", gate)[1]]
    with pytest.raises(Exception, match="SIGKILL"):
        result(killed)
