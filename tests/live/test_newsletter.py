"""The newsletter in a real worker, with a real SMTP server: what goes wrong, and what does with a line taken away."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import chord
from celery.exceptions import ChordError

from examples.newsletter import journal, places, recipients, sending, spool
from examples.newsletter.app import app, make_all, make_chunk, send, start
from examples.newsletter.people import EXCLUDE, INCLUDE, crowd
from examples.newsletter.recipients import Mailing
from examples.newsletter.smtp_server import smtp_server
from examples.newsletter.summary import ACCEPTED
from only_one import AlreadyRunning, configure
from only_one.inspection import holder_of
from only_one.testing import Guarded, redis_server
from rigs.waiting import LIMIT, eventually
from tests.live import newsletter_app as live
from tests.live.workers import Witness, celery_worker, closed_results, environment, sender
from tests.programs import descendants

PEOPLE, SIZE = 120, 40
CHILDREN = 2
LOG = "worker.log"
STUCK = 1
"""The chunk that things happen to."""


@dataclass
class House:
    """A mailing of a test's own, and what has come of it; the servers and the worker are the same for all.

    Attributes:
        smtp: the SMTP server's process.
        worker: the worker's, which has two children.
    """

    folder: Path
    mailing: Mailing
    smtp: Guarded
    worker: Guarded
    witness: Witness
    log_before: int

    @property
    def name(self) -> str:
        """What the mailing is called."""
        return self.mailing.name

    @property
    def chosen(self) -> set[str]:
        """Who is to get it."""
        return {each.email for n in range(self.mailing.chunks) for each in recipients.chunk(self.mailing, n)}

    @property
    def accepted(self) -> Counter[str]:
        """Who has got it, and how often, as the SMTP server says."""
        return Counter((self.folder / ACCEPTED).read_text().split())

    @property
    def log(self) -> str:
        """What the worker has said since the test began."""
        return (self.folder / LOG).read_text()[self.log_before :]

    def chord(self, chunk: Any, body: Any) -> Any:
        """A mailing's chord, of these tasks."""
        return chord([chunk.si(self.name, number) for number in range(self.mailing.chunks)])(body)

    def parts(self) -> list[Path]:
        """Where each child of the worker would write the chunk that things happen to."""
        final = spool.path(self.mailing, STUCK)
        final.parent.mkdir(parents=True, exist_ok=True)
        assert eventually(lambda: len(descendants(self.worker.pid)) == CHILDREN)
        return [final.with_suffix(f".{child}.part") for child in descendants(self.worker.pid)]

    @contextmanager
    def stuck(self) -> Iterator[None]:
        """Let each run that makes the chunk wait on a pipe that nobody reads; afterwards it fails, and is retried."""
        pipes = self.parts()
        for pipe in pipes:
            os.mkfifo(pipe)
        try:
            yield
        finally:
            readers = [os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) for pipe in pipes]
            for pipe in pipes:
                pipe.unlink(missing_ok=True)
            for reader in readers:
                os.close(reader)

    @contextmanager
    def frozen_smtp(self) -> Iterator[None]:
        """Let whoever sends wait for the SMTP server."""
        self.smtp.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.smtp.send_signal(signal.SIGCONT)

    def makers(self) -> list[int]:
        """The processes that have begun to make the chunk that things happen to, by the tasks of the test."""
        return [int(pid) for (pid,) in self.witness.lines("make", self.name, str(STUCK))]

    def senders(self) -> list[int]:
        """The processes that have begun to send it, by the tasks of the test."""
        return [int(pid) for (pid,) in self.witness.lines("send", self.name)]

    def is_sent(self) -> bool:
        """Whether the journal is complete."""
        files = [journal.path(self.mailing, number) for number in range(self.mailing.chunks)]
        return all(file.exists() and file.read_bytes().endswith(journal.COMPLETE) for file in files)


Place = tuple[Path, Guarded, Guarded, Witness]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The servers and the worker of all tests here."""
    folder = tmp_path_factory.mktemp("newsletter")
    witness = Witness(folder / "witness")
    with redis_server() as server, smtp_server(folder / ACCEPTED) as smtp, sender(app, server.url):
        told = environment(
            server.url,
            witness.path,
            NEWSLETTER_BROKER_URL=server.url,
            NEWSLETTER_RETRIES="2",
            **{places.DIRECTORY: str(folder), sending.SMTP: smtp.address},
        )
        with (
            celery_worker("tests.live.newsletter_app", folder / LOG, told, size=CHILDREN) as worker,
            configure(redis=server.url),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv(places.DIRECTORY, str(folder))
            yield folder, smtp.process, worker, witness


@contextmanager
def moved_in(place: Place, name: str, people: int, size: int) -> Iterator[House]:
    """Have a mailing of a test's own."""
    folder, smtp, worker, witness = place
    (folder / recipients.FILE).unlink(missing_ok=True)
    recipients.add(crowd(people))
    mailing = recipients.register(re.sub("[^a-z0-9]+", "-", name)[-60:].strip("-"), INCLUDE, EXCLUDE, size)
    os.truncate(folder / ACCEPTED, 0)
    with configure(prefix="only_one:"):
        yield House(folder, mailing, smtp, worker, witness, len((folder / LOG).read_text()))


@pytest.fixture
def house(place: Place, request: pytest.FixtureRequest) -> Iterator[House]:
    with moved_in(place, request.node.name, PEOPLE, SIZE) as found:
        yield found


def failure(result: Any) -> str:
    """What a chord says that could not be done, and whose body did not run for that."""
    error = result.get(timeout=LIMIT, propagate=False)
    assert isinstance(error, ChordError)
    return str(error)


def test_two_starts_make_one_mailing(house: House) -> None:
    def begin(_: int) -> str:
        with closed_results(app):
            return str(start(house.name).id)

    with ThreadPoolExecutor(2) as pool:
        results = [app.AsyncResult(id_) for id_ in pool.map(begin, range(2))]
    given = [result.get(timeout=LIMIT) for result in results]
    assert eventually(house.is_sent)
    assert sum(each or 0 for each in given) == PEOPLE  # whoever sends sends all, and the other none
    assert house.accepted == Counter(house.chosen)


def test_a_start_while_another_sends_sends_nothing(house: House) -> None:
    with house.frozen_smtp():
        first = start(house.name)
        assert eventually(lambda: holder_of(send, house.name) is not None)
        assert start(house.name).get(timeout=LIMIT) is None
    assert first.get(timeout=LIMIT) == PEOPLE
    assert start(house.name).get(timeout=LIMIT) == 0
    assert house.accepted == Counter(house.chosen)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_chunk_that_fails_for_good_means_that_nothing_is_sent_and_the_next_start_makes_only_that(
    house: House,
) -> None:
    parts = house.parts()
    for part in parts:
        part.symlink_to("/dev/full")
    assert "No space left on device" in failure(start(house.name))
    assert eventually(lambda: spool.missing(house.mailing) == [STUCK])
    assert house.accepted == Counter()
    made = {file: file.stat().st_ino for file in spool.path(house.mailing, 0).parent.glob("??????")}
    for part in parts:
        part.unlink()
    assert start(house.name).get(timeout=LIMIT) == PEOPLE
    assert {file: file.stat().st_ino for file in made} == made
    assert house.accepted == Counter(house.chosen)


@contextmanager
def away(house: House) -> Iterator[None]:
    path = house.folder / recipients.FILE
    path.rename(path.with_suffix(".away"))
    try:
        yield
    finally:
        path.with_suffix(".away").rename(path)


def test_trouble_with_the_database_is_tried_again(house: House) -> None:
    chunks = [make_chunk.si(house.name, number) for number in range(house.mailing.chunks)]
    before = len(house.witness.lines("retry"))
    signs = house.folder / live.TROUBLE
    signs.touch()
    try:
        with away(house):
            result = chord(chunks)(send.si(house.name))
            assert eventually(lambda: len(house.witness.lines("retry")) > before)
    finally:
        signs.unlink()
    assert result.get(timeout=LIMIT) == PEOPLE
    assert house.accepted == Counter(house.chosen)


def test_without_autoretry_it_fails_for_good(house: House) -> None:
    chunks = [live.once.si(house.name, number) for number in range(house.mailing.chunks)]
    with away(house):
        assert "unable to open database file" in failure(chord(chunks)(send.si(house.name)))
    assert house.accepted == Counter()


def test_who_unsubscribes_when_the_message_is_made_does_not_get_it(house: House) -> None:
    late = recipients.chunk(house.mailing, 0)[3]
    everybody = house.chosen
    assert sum(make_all(house.name).get(timeout=LIMIT)) == PEOPLE
    recipients.unsubscribe([late.id])
    assert start(house.name).get(timeout=LIMIT) == PEOPLE - 1
    assert house.accepted == Counter(everybody - {late.email})
    assert journal.count(house.mailing, journal.UNSUBSCRIBED) == 1


def test_nothing_is_sent_by_hand_while_a_chunk_is_missing(house: House) -> None:
    make_chunk.delay(house.name, 0).get(timeout=LIMIT)
    with pytest.raises(sending.IncompleteError, match=f"3 of 4 chunks of {house.name} are missing, the first is 1"):
        send.delay(house.name).get(timeout=LIMIT)
    assert house.accepted == Counter()


# A line taken away: what make_chunk has above it


def test_a_second_start_waits_for_a_chunk_that_is_being_made(house: House) -> None:
    with house.stuck():
        first = house.chord(live.whole, live.collect.s())
        assert eventually(lambda: len(house.makers()) == 1)
        second = house.chord(live.whole, live.collect.s())
        assert eventually(lambda: "did not run" in house.log)
    whole = first.get(timeout=LIMIT)
    assert second.get(timeout=LIMIT) == whole
    assert sum(whole) == PEOPLE


def test_with_skip_the_body_runs_with_none_for_a_chunk(house: House) -> None:
    with house.stuck():
        live.skipping.delay(house.name, STUCK)
        assert eventually(lambda: len(house.makers()) == 1)
        made = house.chord(live.skipping, live.collect.s()).get(timeout=LIMIT)
        assert made[STUCK] is None
        assert None not in made[:STUCK] + made[STUCK + 1 :]
        assert spool.missing(house.mailing) == [STUCK]


def test_without_when_busy_a_second_start_fails_and_leaves_the_first_alone(house: House) -> None:
    with house.stuck():
        first = house.chord(live.refusing, live.collect.s())
        assert eventually(lambda: len(house.makers()) == 1)
        assert AlreadyRunning.__name__ in failure(house.chord(live.refusing, live.collect.s()))
    assert sum(first.get(timeout=LIMIT)) == PEOPLE


def test_without_the_decorator_a_chunk_is_made_by_two_at_once(house: House) -> None:
    with house.stuck():
        for _ in range(2):
            live.uncovered.delay(house.name, STUCK)
        assert eventually(lambda: len(house.makers()) == 2)
        assert len({*house.makers()}) == 2


def kill_maker(house: House) -> None:
    """Kill the process that makes the chunk, and let whoever is next make it."""
    (pid,) = house.makers()
    os.kill(pid, signal.SIGKILL)


def test_a_chunk_is_made_after_its_run_was_killed(house: House) -> None:
    with house.stuck():
        result = house.chord(live.whole, live.collect.s())
        assert eventually(lambda: len(house.makers()) == 1)
        kill_maker(house)
    assert sum(result.get(timeout=LIMIT)) == PEOPLE


def test_with_the_cookbook_s_lock_a_chunk_is_skipped_behind_its_own_dead_run(house: House) -> None:
    with house.stuck():
        result = house.chord(live.cookbook, live.collect.s())
        assert eventually(lambda: len(house.makers()) == 1)
        kill_maker(house)
    assert result.get(timeout=LIMIT)[STUCK] is None
    assert spool.missing(house.mailing) == [STUCK]


def test_without_acks_late_a_chunk_is_lost_with_its_process(house: House) -> None:
    with house.stuck():
        result = house.chord(live.early, live.collect.s())
        assert eventually(lambda: len(house.makers()) == 1)
        kill_maker(house)
    assert "WorkerLostError" in failure(result)
    assert spool.missing(house.mailing) == [STUCK]


# A line taken away: what send has above it, and in it


def test_without_the_decorator_two_bodies_send_twice(place: Place, request: pytest.FixtureRequest) -> None:
    with moved_in(place, request.node.name, sending.BATCH, 4 * sending.BATCH) as house:
        results = [house.chord(make_chunk, live.send_uncovered.si(house.name)) for _ in range(2)]
        assert eventually(lambda: len(house.senders()) == 2)
        with redis.Redis.from_url(app.conf.broker_url) as client:
            client.rpush(house.name, "go", "go")
        assert [result.get(timeout=LIMIT) for result in results] == [sending.BATCH] * 2
        assert house.accepted == Counter([*house.chosen] * 2)


@pytest.mark.parametrize("task", [live.send_checked, live.send_unchecked], ids=["checked", "unchecked"])
def test_a_sender_that_is_paused_for_longer_than_its_lease(
    place: Place, request: pytest.FixtureRequest, task: Any
) -> None:
    people, before = 3 * sending.BATCH, sending.BATCH + 30  # in the middle of a batch
    with moved_in(place, request.node.name, people, 4 * people) as house:
        make_all(house.name).get(timeout=LIMIT)
        first = task.delay(house.name, before + 1)
        assert eventually(lambda: any(is_stopped(pid) for pid in house.senders()))
        (paused,) = house.senders()
        try:
            assert journal.count(house.mailing) == before
            assert eventually(lambda: holder_of(task, house.name, before + 1) is None)
            assert task.delay(house.name).get(timeout=LIMIT) == people - before
        finally:
            os.kill(paused, signal.SIGCONT)
        first.get(timeout=LIMIT)
        assert house.accepted.keys() == house.chosen
        left_of_its_batch = 2 * sending.BATCH - before
        assert sum(house.accepted.values()) - people == (0 if task is live.send_checked else left_of_its_batch)


def test_a_sender_that_is_killed_sends_one_mail_twice_at_most(place: Place, request: pytest.FixtureRequest) -> None:
    """It is killed while it waits for the server, which may accept the message afterwards."""
    people = 4 * sending.BATCH
    with moved_in(place, request.node.name, people, people) as house:
        make_all(house.name).get(timeout=LIMIT)
        result = live.send_checked.delay(house.name)
        assert eventually(lambda: sum(house.accepted.values()) > sending.BATCH)
        with house.frozen_smtp():
            os.kill(house.senders()[0], signal.SIGKILL)
        assert result.get(timeout=LIMIT) < people  # by its second delivery
        assert house.accepted.keys() == house.chosen
        assert sum(house.accepted.values()) - people <= 1


def is_stopped(pid: int) -> bool:
    """Whether a process has been stopped by a signal."""
    command = ["ps", "-o", "stat=", "-p", str(pid)]
    listing = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return listing.stdout.startswith("T")
