"""`buffer_one` on real workers: one runs, one waits, and the newest trigger runs last whatever happens to the others.

What is newer is told by a witness that knows nothing of the lock. A trigger has arrived once it has begun to run or a
delivery of it has been seen to, and what is sent after that is newer.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
import redis

from only_one.testing import redis_server
from tests.live import buffer_app as live
from tests.live.crew import Witness, celery_worker, environment, sender
from tests.waiting import LIMIT, eventually

WORKERS = 2
KEYS = 8
"""That are had at the same time."""
ROUNDS = int(os.environ.get("BUFFER_ROUNDS", "48"))
SEED = int(os.environ.get("BUFFER_SEED", time.time_ns() % 1_000_000))


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        yield client


@pytest.fixture(scope="module")
def witness(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Witness]:
    folder = tmp_path_factory.mktemp("buffer")
    witness = Witness(folder / "witness")
    arguments = server.connection_pool.connection_kwargs
    url = f"redis://127.0.0.1:{arguments['port']}/0"
    with ExitStack() as stack, sender(live.app, url):
        for number in range(WORKERS):
            options = ["-n", f"worker{number}@%h", "-Ofair"]
            started = celery_worker(
                "tests.live.buffer_app", folder / f"log{number}", environment(url, witness.path), *options
            )
            stack.enter_context(started)
        yield witness


def waiting(server: Any) -> int:
    """How many messages there are: in the queue, and with the workers."""
    return int(server.llen("celery")) + int(server.hlen("unacked"))


def arrived(witness: Witness, key: str) -> set[str]:
    """Which triggers of a key have arrived."""
    return {line[0] for word in ("begin", "seen") for line in witness.lines(word, key)}


def test_of_those_that_wait_the_newest_stays(server: Any, witness: Witness) -> None:
    key = str(uuid4())
    answers = []
    for number in range(6):
        answers.append(live.gated.delay(key, number))
        assert eventually(lambda: len(arrived(witness, key)) == len(answers), LIMIT)
    first, *dropped, newest = answers
    assert eventually(lambda: all(answer.ready() for answer in dropped), LIMIT)
    assert [answer.result for answer in dropped] == [None] * 4
    assert [answer.state for answer in dropped] == ["SUCCESS"] * 4
    assert not first.ready()
    assert not newest.ready()
    assert eventually(lambda: waiting(server) <= 2)  # one runs, one waits
    assert [line[0] for line in witness.lines("begin", key)] == ["0"]

    server.rpush(f"gate-{key}", "open")
    assert first.get(timeout=LIMIT) == 0
    assert eventually(lambda: len(witness.lines("begin", key)) == 2, LIMIT)
    server.rpush(f"gate-{key}", "open")
    assert newest.get(timeout=LIMIT) == 5
    assert [line[0] for line in witness.lines("begin", key)] == ["0", "5"]
    assert eventually(lambda: waiting(server) == 0)


def send(server: Any, chance: random.Random, witness: Witness, key: str, number: int) -> Any:
    """Send a trigger that runs, retries and is killed at random."""
    task_id = str(uuid4())
    # In the run, or in what comes before and after it and takes a few milliseconds.
    kills = [chance.choice(["", "", chance.uniform(0, 0.12), chance.uniform(0, 0.01)]) for _ in range(3)]
    server.rpush(f"kills:{task_id}", *kills)
    retries = [chance.uniform(0, 0.3) for _ in range(chance.choice([0, 0, 1, 2]))]
    with witness.path.open("ab", buffering=0) as file:
        file.write(f"send {key} {number} {task_id} {'|'.join(map(str, kills))}\n".encode())
    return live.timed.apply_async((key, number, chance.uniform(0, 0.1), retries), task_id=task_id)


def trigger(server: Any, witness: Witness, seed: str) -> list[Any]:
    """One round for a key: triggers at random, then a last one after all of them have arrived."""
    chance = random.Random(seed)
    count = chance.randint(2, 7)
    answers: list[Any] = []
    for number in range(count):
        answers.append(send(server, chance, witness, seed, number))
        if chance.random() < 0.4:
            assert eventually(lambda: str(number) in arrived(witness, seed), 2 * LIMIT), (seed, number)  # noqa: B023
        else:
            time.sleep(chance.uniform(0, 0.25))
    assert eventually(lambda: len(arrived(witness, seed)) == count, 2 * LIMIT), (seed, arrived(witness, seed))
    answers.append(send(server, chance, witness, seed, count))
    return answers


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


def test_the_newest_trigger_runs_last(server: Any, witness: Witness) -> None:
    print(f"BUFFER_SEED={SEED} BUFFER_ROUNDS={ROUNDS}")
    with ThreadPoolExecutor(KEYS) as pool:
        seeds = [f"{SEED}-{number}" for number in range(ROUNDS)]
        rounds = list(pool.map(lambda seed: trigger(server, witness, seed), seeds))
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
    assert eventually(lambda: waiting(server) == 0, LIMIT)  # what is delivered once more has been, too
    wrong: dict[str, Any] = {}
    everything = witness.lines()
    for seed, answers in zip(seeds, rounds, strict=True):
        lines = [[line[0], *line[2:]] for line in everything if line[1] == seed]
        results = {str(number): answer.result for number, answer in enumerate(answers)}
        if found := judge(lines, str(len(answers) - 1), results):
            wrong[seed] = found
            print(seed, *found, *(" ".join(line) for line in lines), sep="\n  ")
    counted = {
        word: len([line for line in everything if line[0] == word]) for word in ("send", "begin", "retry", "killed")
    }
    print(f"{ROUNDS} rounds: {counted}")
    assert not wrong
    assert counted["killed"] > ROUNDS / 4
    assert not list(server.scan_iter("live:*"))
