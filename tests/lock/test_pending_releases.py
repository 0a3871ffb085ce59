"""What cleans up, and when: keys whose acquire is not confirmed, or whose release has failed."""

from __future__ import annotations

import math
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import redis
from redis.exceptions import ResponseError

from only_one.clock import now
from only_one.connections import server as servers
from only_one.lock import pending_releases, renewal
from only_one.lock.commands import Retained, release_command
from only_one.lock.pending_releases import PendingRelease
from only_one.lock.token import active_tokens
from only_one.testing import RedisServer
from rigs.waiting import eventually
from tests.lock.test_leases import freed
from tests.lock.watched import DOWN, LONG, Watch, keys, node
from tests.renewal import MOMENT, later


@pytest.mark.parametrize(
    ("no_write_in_flight", "reply", "is_over", "pauses"),
    [
        (True, 1, True, [0.05, 0.05]),  # and does no harm if another thread has tried it meanwhile
        (False, 1, False, [0.1, 0.2, 0.4, 0.8, 1.6]),
        (True, OSError(), False, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        (False, ResponseError("OOM"), False, [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]),
        (False, ResponseError("unknown command"), False, [0.05, 0.05, 0.1]),  # it is due at once, by another command
    ],
)
def test_when_a_pending_release_is_tried_again(
    watch: Watch, redis_url: str, reply: object, pauses: list[float], *, no_write_in_flight: bool, is_over: bool
) -> None:
    pending, left = watch.pending(watch.server(redis_url), no_write_in_flight=no_write_in_flight), watch.renewer
    answers: Any = SimpleNamespace(send=lambda _commands: [reply])
    assert pending.try_at == MOMENT
    for pause in pauses:
        assert left.pending_releases.release(answers, [pending]) == [pending] * isinstance(reply, Exception)
        assert (pending.token not in left.pending_releases) is is_over
        assert pending.pause == pytest.approx(pause)
        assert pending.try_at == MOMENT + (pending.pause if pause > 0.05 else 0)


@pytest.mark.parametrize("paused", [0, 60], ids=["", "though the process was paused while it waited for a reply"])
def test_a_pending_release_is_tried_once_more_when_the_token_has_expired(
    watch: Watch, redis_url: str, paused: float
) -> None:
    """Or a SET that has come since the time before would keep the key for a whole lease."""
    left = watch.pending(watch.server(redis_url), no_write_in_flight=False)
    left.pause, left.until = 0.5, MOMENT + 0.75
    watch.clock.moment += paused
    assert not left.note_reply(("DELIFEQ", "k"), 0)
    watch.clock.moment = max(watch.clock.moment, left.try_at)
    assert left.try_at == MOMENT + 0.75
    assert left.note_reply(("DELIFEQ", "k"), 0)


def test_the_token_of_a_set_that_got_no_answer_lasts_from_the_last_attempt_on(watch: Watch, redis_url: str) -> None:
    """A frozen server may carry the SET out when it goes on; until then nobody gives up."""
    left = watch.pending(watch.server(redis_url), no_write_in_flight=False)
    lasts = left.until - MOMENT
    for _ in range(2):
        watch.clock.moment = left.until
        assert not left.note_reply(left.command(), OSError())
        assert left.until == pytest.approx(watch.clock.moment + lasts)


def test_a_retained_value_is_stored_while_it_has_time_left(watch: Watch, redis_url: str) -> None:
    server, key, retained = watch.server(redis_url), watch.key(), Retained(b"kept", MOMENT + 600)
    stores, outlives = (
        PendingRelease(server, key, b"token", MOMENT + lasts, no_write_in_flight=True, retained=retained)
        for lasts in (300, 900)
    )
    assert (stores.until, outlives.until) == (MOMENT + 600, MOMENT + 900)
    for _ in ("the token is there", "it is missing"):
        server.client.send_raw(stores.command())
        assert watch.redis.getdel(key) == b"kept"
    watch.clock.moment = MOMENT + 600
    assert stores.command() == release_command(server.features, key, b"token")


def test_pending_releases_that_are_due(watch: Watch, redis_url: str) -> None:
    """Those that have waited longest come first, and a node that backs off is not asked."""
    server, down = watch.server(redis_url), watch.server(redis_url)
    first, second, later, waits = (
        watch.pending(each, name) for each, name in zip([server] * 3 + [down], ("1", "2", "3", "4"), strict=True)
    )
    first.try_at, second.try_at, later.try_at = MOMENT, MOMENT - 1, math.nextafter(MOMENT, math.inf)
    node(down).backs_off_until = MOMENT + 2
    watch.renewer.pending_releases.release_due()
    assert keys(node(server).trips) == [["2", "1"]]
    assert node(down).trips == []
    assert (later.try_at, waits.try_at) == (math.nextafter(MOMENT, math.inf), MOMENT + 2)
    watch.clock.moment += 2
    watch.renewer.pending_releases.release_due()
    assert keys(node(down).trips) == [["4"]]


def test_a_pending_release_that_is_added_while_another_of_its_token_is_sent_stays(watch: Watch, redis_url: str) -> None:
    """The same task may be withdrawn again, and its words are the token of both."""
    server, left = watch.server(redis_url), watch.renewer.pending_releases
    first = watch.pending(server)

    def answer(_commands: Any) -> list[int]:
        watch.pending(server)
        return [1]

    active_tokens[first.token] = None
    left.release(SimpleNamespace(send=answer), [first])  # type: ignore[arg-type]
    second = left[first.token]
    assert second is not first
    assert first.token in active_tokens
    server.features.release = "EVAL"  # which all servers know
    left.release(node(server), [second])
    assert not left
    assert first.token not in active_tokens


def test_of_too_many_pending_releases_the_oldest_is_forgotten(
    watch: Watch, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not at the exit. And multiprocessing is told once to send them at the end."""
    util, server = Mock(), watch.server(redis_url)
    monkeypatch.setitem(sys.modules, "multiprocessing.util", util)
    active_tokens[b"0"] = None
    for number in range(10_001):
        assert len(watch.renewer.pending_releases) == number
        renewal.release_later(PendingRelease(server, "k", b"%d" % number, MOMENT, no_write_in_flight=True))
    assert len(watch.renewer.pending_releases) == 10_000
    assert next(iter(watch.renewer.pending_releases)) == b"1"
    assert b"0" not in active_tokens
    assert [renewal.is_to_be_released(token) for token in (b"0", b"1")] == [False, True]
    util.Finalize.assert_called_once_with(None, renewal.finish_pending_releases, exitpriority=0)
    at_exit = PendingRelease(server, "k", b"at exit", MOMENT)
    renewal.release_at_exit(at_exit)
    assert [*watch.renewer.pending_releases.items()][10_000:] == [(b"at exit", at_exit)]


@pytest.mark.parametrize(("url", "slept"), [(None, []), (DOWN, [0.0625] * 32)], ids=["up", "down"])
def test_the_pending_releases_at_the_end_of_the_process(
    watch: Watch, redis_url: str, monkeypatch: pytest.MonkeyPatch, url: str | None, slept: list[float]
) -> None:
    """It tries for two seconds, until a server has answered; for what may still arrive it does not wait."""
    paused: list[float] = []

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        watch.clock.moment += seconds

    monkeypatch.setattr(pending_releases, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(pending_releases, "_FIRST_PAUSE", 0.0625)  # of few bits, so that nothing is rounded
    server = watch.server(url or redis_url)
    server.features.release = "EVAL"  # which each server knows
    watch.pending(server, "none in flight")
    watch.pending(server, "other", no_write_in_flight=False)
    renewal._renewer.pending_releases.finish()
    assert paused == slept
    times = len(paused)
    renewal._renewer.pending_releases.finish()  # as after `atexit`, by multiprocessing
    assert len(paused) == times
    trips = keys(node(server).trips)
    assert [sorted(trip) for trip in trips] == [["none in flight", "other"]] * len(trips)
    assert len(trips) == len(paused) or not url


@pytest.mark.parametrize("no_write_in_flight", [True, False], ids=["none in flight", "on their way"])
@pytest.mark.parametrize("release", ["DELIFEQ", "EVAL"])
def test_many_tokens_of_unknown_fate_are_released_in_a_few_trips(
    server: RedisServer, prefix: str, release: Any, *, no_write_in_flight: bool
) -> None:
    """However the server releases: of what is sent in one trip, it reads much at a time."""
    names = [f"{prefix}{number}" for number in range(1000)]
    theirs, left = servers.find_server(server.url), renewal._renewer.pending_releases
    theirs.features.release = release

    def are_tried() -> bool:
        """Each is gone, or is asked for again."""
        return all(left[name.encode()].pause > 0.05 for name in names if name.encode() in left)

    with redis.Redis.from_url(server.url) as client:
        client.mset({name: name for name in names})
        theirs.node_of(names[0]).fail(LONG)
        for name in names:
            pending = PendingRelease(
                theirs, name, name.encode(), now() + 2 * LONG, no_write_in_flight=no_write_in_flight
            )
            renewal.release_later(pending)
        before = client.info("stats")["total_reads_processed"]
        with later(LONG):
            assert eventually(are_tried)
        assert client.info("stats")["total_reads_processed"] - before < len(names) / 2
        assert client.exists(*names) == 0
        if not no_write_in_flight:  # "missing" is not final
            client.set(names[0], names[0])
            assert freed(client, names[0])


def test_a_release_waits_for_a_client_that_a_callable_could_not_make_yet(server: RedisServer, prefix: str) -> None:
    """And the thread that renews does not wait for the callable, which may take long; it is asked once at a time."""
    asked: list[str] = []

    def source() -> str:
        asked.append(threading.current_thread().name)
        if len(asked) == 2:
            eventually(lambda: pending.pause > 0.2)  # it is tried again meanwhile
            asked.append("the end of")
        if len(asked) < 4:
            msg = "away"
            raise OSError(msg)
        return server.url

    key = f"{prefix}k"
    with redis.Redis.from_url(server.url) as client:
        client.set(key, "token")
        pending = PendingRelease(servers.find_server(source), key, b"token", now() + LONG)
        renewal.release_later(pending)
        assert freed(client, key)
    assert asked == [threading.current_thread().name, "only_one-client", "the end of", "only_one-client"]
