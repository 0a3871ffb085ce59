"""`buffer_one` on real workers: one runs, one waits, and the newest trigger runs last whatever happens to the others.

What is newer is told by a witness that knows nothing of the lock. A trigger has arrived once it has begun to run or a
delivery of it has been seen to, and what is sent after that is newer.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any
from uuid import uuid4

import pytest
import redis

from only_one.testing import redis_server
from rigs.waiting import LIMIT, eventually
from tests.live import buffer_app as live
from tests.live.brokers import Broker
from tests.live.brokers import broker as broker_of
from tests.live.workers import BROKER, Witness, celery_worker, closed_results, environment, sender

KEYS = 8
"""That are had at the same time."""
FEW = 5
"""Rounds that are had each time."""
ROUNDS = 96
"""That are had in all, where there is time."""
SEED = int(os.environ.get("ONLY_ONE_SOAK_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def broker(server: Any) -> Iterator[Broker]:
    with broker_of(server, url_of(server), live.app) as broker:
        yield broker


@pytest.fixture(scope="module")
def witness(server: Any, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    witness = Witness(tmp_path_factory.mktemp("buffer") / "witness")
    with (
        sender(live.app, url_of(server), broker_url=broker.url, **broker.settings),
        worker(server, broker, witness, "first"),
    ):
        yield witness


def url_of(server: Any) -> str:
    return f"redis://127.0.0.1:{server.connection_pool.connection_kwargs['port']}/0"


def worker(server: Any, broker: Broker, witness: Witness, name: str) -> AbstractContextManager[Any]:
    env = environment(url_of(server), witness.path, **{BROKER: broker.url})
    options = ["-n", f"{name}@%h", "-Ofair"]
    return celery_worker("tests.live.buffer_app", witness.path.with_name(name), env, *options)


def arrived(witness: Witness, key: str) -> set[str]:
    """Which triggers of a key have arrived."""
    return {line[0] for word in ("begin", "seen") for line in witness.lines(word, key)}


def arrives(witness: Witness, key: str, number: int, answer: Any) -> bool:
    """Whether a trigger arrives. A process may be killed after it has given the result, and before it has said so."""

    def has_arrived() -> bool:
        if str(number) not in arrived(witness, key) and answer.ready():
            witness.append("seen", key, number)
        return str(number) in arrived(witness, key)

    return eventually(has_arrived, 2 * LIMIT)


def test_of_those_that_wait_the_newest_stays(server: Any, broker: Broker, witness: Witness) -> None:
    key = str(uuid4())
    answers = []
    for number in range(6):
        answers.append(live.gated.delay(key, number))
        assert eventually(lambda: len(arrived(witness, key)) == len(answers))
    first, *dropped, newest = answers
    assert eventually(lambda: all(answer.ready() for answer in dropped))
    assert [answer.result for answer in dropped] == [None] * 4
    assert [answer.state for answer in dropped] == ["SUCCESS"] * 4
    assert not first.ready()
    assert not newest.ready()
    assert eventually(lambda: broker.messages() <= 2)  # one runs, one waits
    assert [line[0] for line in witness.lines("begin", key)] == ["0"]

    server.rpush(f"gate-{key}", "open")
    assert first.get(timeout=LIMIT) == 0
    assert eventually(lambda: len(witness.lines("begin", key)) == 2)
    server.rpush(f"gate-{key}", "open")
    assert newest.get(timeout=LIMIT) == 5
    assert [line[0] for line in witness.lines("begin", key)] == ["0", "5"]
    assert eventually(lambda: broker.messages() == 0)


def send(server: Any, chance: random.Random, witness: Witness, key: str, number: int) -> Any:
    """Send a trigger that runs, retries and is killed at random."""
    task_id = str(uuid4())
    # In the run, or in what comes before and after it and takes a few milliseconds.
    kills = [chance.choice(["", "", chance.uniform(0, 0.12), chance.uniform(0, 0.01)]) for _ in range(3)]
    server.rpush(f"kills:{task_id}", *kills)
    retries = [chance.uniform(0, 0.3) for _ in range(chance.choice([0, 0, 1, 2]))]
    witness.append("send", key, number, task_id, "|".join(map(str, kills)))
    return live.timed.apply_async((key, number, chance.uniform(0, 0.1), retries), task_id=task_id)


def trigger(server: Any, witness: Witness, seed: str) -> list[str]:
    """One round for a key: triggers at random, then a last one after all of them have arrived; returns their ids."""
    chance = random.Random(seed)
    count = chance.randint(2, 7)
    with closed_results(live.app):
        answers = []
        for number in range(count):
            answers.append(send(server, chance, witness, seed, number))
            if chance.random() < 0.4:
                assert arrives(witness, seed, number, answers[number]), (seed, number)
            else:
                time.sleep(chance.uniform(0, 0.25))
        for number, answer in enumerate(answers):
            assert arrives(witness, seed, number, answer), (seed, number)
        answers.append(send(server, chance, witness, seed, count))
        return [answer.id for answer in answers]


def older_than(lines: list[list[str]], number: str) -> set[str]:
    """Which triggers had arrived before this one was sent."""
    sent = next(place for place, line in enumerate(lines) if line[0] == "send" and line[1] == number)
    return {line[1] for line in lines[:sent] if line[0] in {"begin", "seen"}}


def judge(lines: list[list[str]], last: str, results: dict[str, Any]) -> list[str]:
    """What is wrong with a key's history."""
    wrong = []
    begun = [line[1] for line in lines if line[0] == "begin"]
    for place, number in enumerate(begun):
        if overtaken := older_than(lines, number) & set(begun[place + 1 :]):
            wrong.append(f"{sorted(overtaken)} ran after the newer {number}")
    if begun[-1:] != [last]:
        wrong.append(f"the last to run is {begun[-1:]}, not {last}")
    if not any(line[:2] == ["end", last] for line in lines):
        wrong.append(f"{last} was not done")
    if results[last] not in {int(last), None} or (
        results[last] is None and not any(line[:2] == ["killed", last] for line in lines)
    ):
        wrong.append(f"{last} gave {results[last]!r}")
    ended = {line[1] for line in lines if line[0] == "end"}
    wrong += [f"{number} ended with {got!r}" for number, got in results.items() if got not in {None, int(number)}]
    wrong += [f"{number} gave a result undone" for number, got in results.items() if got and number not in ended]
    return wrong + overlaps(lines)


def overlaps(lines: list[list[str]]) -> list[str]:
    """Runs that began while another process was at it."""
    wrong = []
    dead = set()
    running: tuple[str, ...] = ()
    for word, number, *rest in lines:
        if word == "killed":
            dead.add(rest[0])  # which its other thread may have survived by a line
        if word == "begin" and rest[0] not in dead:
            if running:
                wrong.append(f"{number} began beside {running}")
            running = (number, rest[0])
        elif word in {"end", "retry", "killed"} and running[1:] == (rest[0],):
            running = ()
    return wrong


def test_the_newest_trigger_runs_last(server: Any, broker: Broker, witness: Witness) -> None:
    killed = sees_the_newest_run_last(server, broker, witness, [f"{SEED}-{number}" for number in range(FEW)])
    assert killed > FEW / 4


@pytest.mark.soak
def test_the_newest_trigger_runs_last_all_the_time(
    server: Any, broker: Broker, witness: Witness, record_property: Callable[[str, Any], None]
) -> None:
    """The same for longer, by two workers."""
    with worker(server, broker, witness, "second"):
        seeds = [f"{SEED}-long-{number}" for number in range(ROUNDS)]
        record_property("killed", sees_the_newest_run_last(server, broker, witness, seeds))


def sees_the_newest_run_last(server: Any, broker: Broker, witness: Witness, seeds: list[str]) -> int:
    """Have rounds, a few at the same time; returns how many runs were killed."""
    print(f"ONLY_ONE_SOAK_SEED={SEED}")
    with ThreadPoolExecutor(KEYS) as pool:
        sent = pool.map(lambda seed: trigger(server, witness, seed), seeds)
        rounds = [[live.app.AsyncResult(id_) for id_ in ids] for ids in sent]
    expected = [answer for answers in rounds for answer in answers]

    def undone() -> list[str]:
        """Those without a result, but for one whose process was killed between the end of its run and its result."""
        ended = {tuple(line[:2]) for line in witness.lines("end")}
        names = {
            answer.id: (seed, str(n))
            for seed, all_of in zip(seeds, rounds, strict=True)
            for n, answer in enumerate(all_of)
        }
        return [str(names[answer.id]) for answer in expected if not answer.ready() and names[answer.id] not in ended]

    assert eventually(lambda: not undone(), 2 * LIMIT), undone()
    assert eventually(lambda: broker.messages() == 0)  # what is delivered once more has been, too
    wrong: dict[str, Any] = {}
    everything = witness.lines()
    for seed, answers in zip(seeds, rounds, strict=True):
        lines = [[line[0], *line[2:]] for line in everything if line[1] == seed]
        results = {str(number): answer.result for number, answer in enumerate(answers)}
        if found := judge(lines, str(len(answers) - 1), results):
            wrong[seed] = found
            print(seed, *found, *(" ".join(line) for line in lines), sep="\n  ")
    counted = Counter(line[0] for line in everything if line[1] in seeds)
    print(f"{len(seeds)} rounds: {counted}")
    assert not wrong
    assert not list(server.scan_iter("live:*"))
    return counted["killed"]
