"""The newsletter in a real worker, with a real SMTP server: what goes wrong, and what becomes of the mailing."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from celery import group

from examples.newsletter import recipients
from examples.newsletter.app import app, make_chunk, send, start
from examples.newsletter.smtp_server import smtp_server
from only_one import configure
from only_one.inspection import holder_of
from only_one.testing import Guarded
from rigs.waiting import LIMIT, eventually
from tests.live.workers import World, world

SIZE, CHUNKS, IN_A_CHUNK = 40, 4, 36
PEOPLE = CHUNKS * IN_A_CHUNK
"""Those who have not unsubscribed."""

MANY = 20 * SIZE
STUCK = 1
"""The chunk to which things happen."""

STUCK_MESSAGE = CHUNKS * SIZE + 1
"""The recipient to whose message things happen, of a mailing to many."""


class House:
    """The servers and the worker of all tests here, and the mailing of one of them."""

    name = ""

    def __init__(self, folder: Path, smtp: Guarded, place: World) -> None:
        self.folder, self.smtp, self.place = folder, smtp, place

    def begin(self, name: str, people: int = CHUNKS * SIZE) -> None:
        """Have new people, and a mailing to them of which nothing is made."""
        self.name = re.sub("[^a-z0-9]+", "-", name)
        (self.folder / "recipients.sqlite").unlink(missing_ok=True)
        recipients.have_people(people)
        os.truncate(self.folder / "accepted", 0)
        self.place.client.delete("message")

    @property
    def chosen(self) -> Counter[str]:
        """Who is to get it, once each."""
        return Counter(each.email for number in range(recipients.chunks()) for each in recipients.chunk(number))

    @property
    def accepted(self) -> Counter[str]:
        """Who has got it, and how often, as the SMTP server says."""
        return Counter((self.folder / "accepted").read_text().split())

    def make(self) -> int:
        """Have all chunks made; returns how many messages that are."""
        self.let_go()
        chunks = group(make_chunk.si(self.name, number) for number in range(recipients.chunks()))
        return sum(chunks().get(timeout=LIMIT))

    def let_go(self) -> None:
        """Let the runs go on that wait for the test, or that come."""
        self.place.client.rpush(self.name, *["go"] * 20)

    @contextmanager
    def frozen_smtp(self) -> Iterator[None]:
        """Let whoever sends wait for the SMTP server."""
        self.smtp.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.smtp.send_signal(signal.SIGCONT)

    def are_stuck(self) -> list[int]:
        """The processes that have begun to make the chunk to which things happen; waited for."""
        self.place.wait_for("make", self.name)
        return [note.pid for note in self.place.notes("make", self.name)]

    @contextmanager
    def caught_sending(self) -> Iterator[int]:
        """The process that sends, while it waits for the server, which may accept the message afterwards."""
        assert eventually(lambda: self.accepted.total() == PEOPLE)
        with self.frozen_smtp():
            self.place.client.rpush("message", *["go"] * 3)  # the next sender begins with it
            holder = holder_of(send, self.name)
            assert holder is not None
            yield holder.pid


@pytest.fixture(scope="module")
def shared_house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("newsletter")
    with (
        world(app, folder, kind="redis") as place,
        smtp_server(folder / "accepted") as (smtp, process),
        configure(redis=place.server.url),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("NEWSLETTER_DIRECTORY", str(folder))
        patch.setattr(recipients, "SIZE", SIZE)
        told = {"NEWSLETTER_CHUNK": str(SIZE), "NEWSLETTER_SMTP": smtp, "NEWSLETTER_RETRIES": "2"}
        told |= {"NEWSLETTER_DIRECTORY": str(folder), "NEWSLETTER_BROKER_URL": place.server.url}
        told |= {"STUCK_CHUNK": str(STUCK), "STUCK_MESSAGE": str(STUCK_MESSAGE)}
        with place.worker("-c", "2", module="tests.live.newsletter_app", **told):
            yield House(folder, process, place)


@pytest.fixture
def house(shared_house: House, request: pytest.FixtureRequest) -> Iterator[House]:
    shared_house.begin(request.node.name)
    with configure(prefix="only_one:"):
        yield shared_house


# Made


def test_a_second_start_meets_a_chunk_that_is_being_made(house: House) -> None:
    results = [start(house.name)]
    house.are_stuck()
    results.append(start(house.name))
    requeued = f"did not run: only_one:{make_chunk.name}:{house.name}:{STUCK} "
    assert eventually(lambda: requeued in house.place.log())
    assert len(house.are_stuck()) == 1
    house.let_go()
    assert sum(result.get(timeout=LIMIT) or 0 for result in results) == PEOPLE
    assert house.accepted == house.chosen


def test_the_process_that_makes_a_chunk_is_killed(house: House) -> None:
    result = start(house.name)
    os.kill(house.are_stuck()[0], signal.SIGKILL)
    house.let_go()
    assert result.get(timeout=LIMIT) == PEOPLE


# Sent


def test_who_unsubscribes_when_the_message_is_made_does_not_get_it(house: House) -> None:
    everybody = house.chosen
    assert house.make() == PEOPLE
    with recipients.database("rw") as connection:
        connection.execute("UPDATE recipients SET unsubscribed = 1 WHERE id = 3")
    assert start(house.name).get(timeout=LIMIT) == PEOPLE - 1
    assert house.accepted == everybody - Counter(["person-3@example.net"])


def test_a_start_while_another_sends_sends_nothing(house: House) -> None:
    house.let_go()
    with house.frozen_smtp():
        first = start(house.name)
        assert eventually(lambda: holder_of(send, house.name) is not None)
        assert start(house.name).get(timeout=LIMIT) is None
    assert first.get(timeout=LIMIT) == PEOPLE
    assert start(house.name).get(timeout=LIMIT) == 0
    assert house.accepted == house.chosen


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=["paused for longer than its lease", "killed"])
def test_a_sender_that_is_paused_or_killed_sends_one_mail_twice_at_most(house: House, how: signal.Signals) -> None:
    house.begin(house.name, people=MANY)  # so that it takes a while
    house.make()
    result = send.delay(house.name)
    with house.caught_sending() as sender_pid:
        os.kill(sender_pid, how)
    if how is signal.SIGSTOP:
        try:
            assert eventually(lambda: holder_of(send, house.name) is None)
            assert 0 < send.delay(house.name).get(timeout=LIMIT) < house.chosen.total()
        finally:
            os.kill(sender_pid, signal.SIGCONT)
    assert result.get(timeout=LIMIT) < house.chosen.total()  # of one that was killed, by its second delivery
    assert house.accepted.keys() == house.chosen.keys()
    assert house.accepted.total() - house.chosen.total() <= 1
