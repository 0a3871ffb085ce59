"""A task that a worker has received and has not begun: the key says which worker's it is, and is free when that dies.

The worker has one process, which a run keeps busy until its gate is opened; what comes after it waits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from uuid import uuid4

import pytest

from only_one import configure
from only_one.__main__ import main
from only_one.holder import Holder
from only_one.inspection import held
from rigs.waiting import LIMIT, eventually
from tests.live import queue_app as live
from tests.live.workers import PREFIX, World, answered, kill_tree, world

HOUR = 3600
A_LEASE = 30


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(live.app, "tests.live.queue_app", tmp_path_factory.mktemp("received")) as found:
        yield found


@pytest.fixture
def place(broker: World) -> Iterator[World]:
    with configure(redis=broker.server.url, prefix=PREFIX):
        yield broker
    broker.client.flushdb()


@pytest.fixture
def gate() -> str:
    return f"gate-{uuid4().hex}"


def holder(place: World, gate: str) -> Holder | None:
    return Holder.parse(place.client.get(PREFIX + gate) or b"")


def state(place: World, gate: str) -> str:
    found = holder(place, gate)
    return found.state if found else "free"


def expires_in(place: World, gate: str) -> float:
    return float(place.client.pttl(PREFIX + gate)) / 1000


def keep_busy(place: World) -> str:
    """Have the worker's one process run something; returns its gate."""
    gate = f"first-{uuid4().hex}"
    live.gated.delay(gate)
    place.wait_for("begin", gate)
    return gate


def open_gate(place: World, gate: str) -> None:
    place.client.rpush(f"gate:{gate}", 1)


def is_received(place: World, gate: str, pid: int, attempt: int = 0) -> bool:
    found = holder(place, gate)
    return found is not None and (found.state, found.pid, found.attempt) == ("received", pid, attempt)


def test_it_is_free_at_once_when_its_worker_is_killed(
    place: World, gate: str, capsys: pytest.CaptureFixture[str]
) -> None:
    by_hand = f"{gate}-by-hand"
    with place.worker("-c", "1") as worker:
        keep_busy(place)
        waits = live.plain.delay(gate)
        live.plain.delay(by_hand)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        assert eventually(lambda: is_received(place, by_hand, worker.pid))
        assert live.plain.delay(gate) == waits
        assert expires_in(place, gate) <= A_LEASE
        kill_tree(worker)
    assert {each.key: each.process for each in held(f"*{gate}*")} == dict.fromkeys(
        [PREFIX + gate, PREFIX + by_hand], "dead"
    )
    assert live.plain.delay(gate) != waits
    assert state(place, gate) == "queued"
    main(["release", "--dead", "--match", f"{gate}*"])
    assert by_hand in capsys.readouterr().out
    assert state(place, by_hand) == "free"


def test_its_run_has_the_key_and_gives_it_back(place: World, gate: str) -> None:
    with place.worker("-c", "1") as worker:
        first = keep_busy(place)
        waits = live.gated.delay(gate)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        open_gate(place, first)
        place.wait_for("begin", gate)
        found = holder(place, gate)
        assert found is not None
        assert (found.state, found.task_id) == ("running", waits.id)
        open_gate(place, gate)
        assert waits.get(timeout=LIMIT) == "done"
        assert eventually(lambda: not place.is_held(gate))


def test_the_next_worker_takes_it_over(place: World, gate: str) -> None:
    with place.worker("-c", "1") as worker:
        keep_busy(place)
        waits = live.plain.delay(gate)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        copy = place.broker.copy_of(waits.id)
        kill_tree(worker)
    with place.worker("-c", "1") as worker:
        first = keep_busy(place)
        place.broker.deliver_again(copy)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        assert live.plain.delay(gate) == waits
        open_gate(place, first)
        assert waits.get(timeout=LIMIT) == "done"
        assert eventually(lambda: not place.is_held(gate))


@pytest.mark.parametrize("how", ["warm", "cold", "cold by a second Ctrl-C"])
def test_it_is_queued_again_when_its_worker_ends(place: World, gate: str, how: str) -> None:
    signals = {"warm": [signal.SIGTERM], "cold": [signal.SIGQUIT]}.get(how, [signal.SIGINT, signal.SIGINT])
    said = place.log()
    with place.worker("-c", "1") as worker:
        first = keep_busy(place)
        waits = [live.plain.delay(f"{gate}-{number}") for number in range(3)]
        assert eventually(lambda: is_received(place, f"{gate}-2", worker.pid))
        for number, each in enumerate(signals):
            assert not number or eventually(lambda: "Warm shutdown" in place.log()[len(said) :])
            os.kill(worker.pid, each)
        if how == "warm":
            open_gate(place, first)
        worker.wait(LIMIT)
    unrun = [number for number in range(3) if not place.notes("begin", f"{gate}-{number}")]
    assert unrun
    for number in unrun:
        assert state(place, f"{gate}-{number}") == "queued"
        assert expires_in(place, f"{gate}-{number}") > A_LEASE
        assert live.plain.delay(f"{gate}-{number}") == waits[number]


def test_what_waits_for_its_time_is_kept_for_it(place: World, gate: str) -> None:
    with place.worker("-c", "1") as worker:
        waits = live.plain.apply_async((gate,), countdown=HOUR)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        assert HOUR < expires_in(place, gate) <= HOUR + A_LEASE
        kill_tree(worker)
    assert live.plain.delay(gate) != waits


def test_a_retry_that_waits_in_a_worker_is_its(place: World, gate: str) -> None:
    with place.worker("-c", "1") as worker:
        waits = live.waits_long.delay(gate)
        assert eventually(lambda: is_received(place, gate, worker.pid, attempt=1))
        assert live.waits_long.delay(gate) == waits
        kill_tree(worker)
    assert live.waits_long.delay(gate) != waits


def test_one_that_is_revoked_is_free(place: World, gate: str) -> None:
    with place.worker("-c", "1") as worker:
        first = keep_busy(place)
        waits = live.plain.delay(gate)
        assert eventually(lambda: is_received(place, gate, worker.pid))
        assert answered(live.app.control.revoke, waits.id)
        open_gate(place, first)
        assert eventually(lambda: not place.is_held(gate))
