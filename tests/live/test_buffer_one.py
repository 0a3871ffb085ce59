"""`buffer_one` on real workers: one runs, one waits, and the newest task runs last whatever happens to the others.

What is newer is told by a witness that knows nothing of the lock. A task has arrived once it has begun to run or a
delivery of it has been seen to, and what is sent after that is newer.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from rigs.waiting import LIMIT, eventually
from tests.live import app as live
from tests.live.workers import MarkerUpdate, Scene, World, closed_results

KEYS = 8
"""That are had at the same time."""
FEW = 5
"""Rounds that are had each time."""
ROUNDS = 96
"""That are had in all, where there is time."""
SEED = int(os.environ.get("ONLY_ONE_SOAK_SEED", time.time_ns() % 1_000_000))

Line = tuple[str, str, int]
"""What a run has written down: a word, the number of its task, and its process."""


@pytest.fixture(scope="module", autouse=True)
def worker(place: World) -> Iterator[None]:
    with place.worker("-Ofair"):
        yield


def arrived(place: World, key: str) -> set[str]:
    """Which tasks with a key have arrived."""
    return {line[-1] for word in ("begin", "seen") for line in place.witness.lines(word, key)}


def arrives(place: World, key: str, number: int, answer: Any) -> bool:
    """Whether a task arrives. A process may be killed after it has given the result, and before it has said so."""

    def has_arrived() -> bool:
        if str(number) not in arrived(place, key) and answer.ready():
            place.witness.append("seen", key, number)
        return str(number) in arrived(place, key)

    return eventually(has_arrived, 2 * LIMIT)


def test_of_those_that_wait_the_newest_stays(scene: Scene) -> None:
    place, answers = scene.place, []
    for number in range(6):
        answers.append(live.BELOW["buffered"].delay(scene.key, number, "gate"))
        place.wait_for("seen" if number else "begin", scene.key)
        assert eventually(lambda: {line[0] for line in place.witness.lines("seen", scene.key)} >= seen(len(answers)))
    first, *dropped, newest = answers
    assert [answer.get(timeout=LIMIT) for answer in dropped] == [None] * 4
    assert not first.ready()
    assert not newest.ready()
    assert eventually(lambda: place.broker.messages() <= 2)  # one runs, one waits

    scene.open(2)
    assert first.get(timeout=LIMIT) == 0
    assert newest.get(timeout=LIMIT) == 5
    assert scene.results() == ["0", "5"]
    assert eventually(lambda: place.broker.messages() == 0)


def seen(count: int) -> set[str]:
    """The numbers of those of which a delivery has been seen to, while the first runs."""
    return {str(number) for number in range(1, count)}


def send(place: World, chance: random.Random, key: str, number: int) -> Any:
    """Send a task that runs, retries and is killed at random."""
    task_id = str(uuid4())
    # In the run, or in what comes before and after it and takes a few milliseconds.
    kills = [chance.choice(["", "", chance.uniform(0, 0.12), chance.uniform(0, 0.01)]) for _ in range(3)]
    place.client.rpush(f"kills:{task_id}", *kills)
    retries = [chance.uniform(0, 0.3) for _ in range(chance.choice([0, 0, 1, 2]))]
    place.witness.append("send", key, number, task_id, "|".join(map(str, kills)))
    return live.timed.apply_async((key, number, chance.uniform(0, 0.1), retries), task_id=task_id)


def send_at_random(place: World, seed: str) -> list[str]:
    """One round for a key: tasks at random, then a last one after all of them have arrived; returns their ids."""
    chance = random.Random(seed)
    count = chance.randint(2, 7)
    with closed_results(live.app):
        answers = []
        for number in range(count):
            answers.append(send(place, chance, seed, number))
            if chance.random() < 0.4:
                assert arrives(place, seed, number, answers[number]), (seed, number)
            else:
                time.sleep(chance.uniform(0, 0.25))
        for number, answer in enumerate(answers):
            assert arrives(place, seed, number, answer), (seed, number)
        answers.append(send(place, chance, seed, count))
        return [answer.id for answer in answers]


def older_than(lines: list[Line], number: str) -> set[str]:
    """Which tasks had arrived before this one was sent."""
    sent = next(place for place, line in enumerate(lines) if line[:2] == ("send", number))
    return {of for word, of, _ in lines[:sent] if word in {"begin", "seen"}}


def judge(lines: list[Line], last: str, results: dict[str, Any]) -> list[str]:
    """What is wrong with a key's history."""
    wrong = []
    begun, ended, killed = ([of for word, of, _ in lines if word == which] for which in ("begin", "end", "killed"))
    for place, number in enumerate(begun):
        if overtaken := older_than(lines, number) & set(begun[place + 1 :]):
            wrong.append(f"{sorted(overtaken)} ran after the newer {number}")
    if begun[-1:] != [last]:
        wrong.append(f"the last to run is {begun[-1:]}, not {last}")
    if last not in ended:
        wrong.append(f"{last} was not done")
    if results[last] != int(last) and (results[last] is not None or last not in killed):
        wrong.append(f"{last} gave {results[last]!r}")
    wrong += [f"{number} ended with {got!r}" for number, got in results.items() if got not in {None, int(number)}]
    wrong += [f"{number} gave a result undone" for number, got in results.items() if got and number not in ended]
    return wrong + overlaps(lines)


def overlaps(lines: list[Line]) -> list[str]:
    """Runs that began while another process was at it."""
    wrong: list[str] = []
    dead: set[int] = set()
    running: tuple[str, int] | None = None
    for word, number, pid in lines:
        if word == "killed":
            dead.add(pid)  # which its other thread may have survived by a line
        if word == "begin" and pid not in dead:
            if running:
                wrong.append(f"{number} began beside {running}")
            running = (number, pid)
        elif word in {"end", "retry", "killed"} and running and running[1] == pid:
            running = None
    return wrong


def test_the_newest_task_runs_last(place: World) -> None:
    killed = sees_the_newest_run_last(place, [f"{SEED}-{number}" for number in range(FEW)])
    assert killed > FEW / 4


@pytest.mark.soak
def test_the_newest_task_runs_last_all_the_time(place: World, record_property: Callable[[str, Any], None]) -> None:
    """The same for longer, by two workers."""
    with place.worker("-Ofair"):
        seeds = [f"{SEED}-long-{number}" for number in range(ROUNDS)]
        record_property("killed", sees_the_newest_run_last(place, seeds))


def sees_the_newest_run_last(place: World, seeds: list[str]) -> int:
    """Have rounds, a few at the same time; returns how many runs were killed."""
    print(f"ONLY_ONE_SOAK_SEED={SEED}")
    with ThreadPoolExecutor(KEYS) as pool:
        sent = pool.map(lambda seed: send_at_random(place, seed), seeds)
        rounds = {
            seed: {str(number): live.app.AsyncResult(id_) for number, id_ in enumerate(ids)}
            for seed, ids in zip(seeds, sent, strict=True)
        }

    def undone() -> list[tuple[str, str]]:
        """Those without a result, but for one whose process was killed between the end of its run and its result."""
        waiting = [(seed, each) for seed, its in rounds.items() for each, answer in its.items() if not answer.ready()]
        ended = {tuple(line[:2]) for line in place.witness.lines("end")}
        return [each for each in waiting if each not in ended]

    assert eventually(lambda: not undone(), 2 * LIMIT), undone()
    assert eventually(lambda: place.broker.messages() == 0)  # what is delivered once more has been, too
    wrong: dict[str, Any] = {}
    everything = place.witness.notes()
    for seed, answers in rounds.items():
        lines = [line_of(each) for each in everything if each.rest[1:2] == [seed] and each.rest[0] != "received"]
        results = {number: answer.result for number, answer in answers.items()}
        if found := judge(lines, str(len(answers) - 1), results):
            wrong[seed] = found
            print(seed, *found, *lines, sep="\n  ")
    counted = Counter(each.rest[0] for each in everything if each.rest[1] in seeds)
    print(f"{len(seeds)} rounds: {counted}")
    assert not wrong
    assert place.no_key_is_left()
    return counted["killed"]


def line_of(note: MarkerUpdate) -> Line:
    word, _, number, *_ = note.rest
    return word, number, note.pid
