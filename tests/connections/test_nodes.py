"""The nodes that the renewing thread asks, and what it learns from them, by a clock that stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import redis as redis_py
from redis import BlockingConnectionPool, ConnectionPool
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError, TryAgainError
from redis.sentinel import Sentinel, SentinelConnectionPool

from only_one.connections import asyncio_connections, nodes, slots
from only_one.connections.kept_connections import KeptConnections
from only_one.connections.own_pools import SHORT_TIMEOUTS, SentinelsInTurn, own_pool
from only_one.driver import ServerTimeout
from rigs.proxy import Proxy
from tests.renewal import MOMENT, Clock

DOWN = redis_py.ConnectionError()
SILENT = redis_py.TimeoutError()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, nodes, slots)


def test_a_node_that_cannot_be_reached_backs_off_for_longer_each_time(clock: Clock) -> None:
    """Until it answers; or for as long as it is told."""
    node = nodes.Node(Mock(**{"send.side_effect": [*[DOWN] * 8, [1, 2], DOWN, AttributeError()]}))
    assert node.backs_off_until == 0.0
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0):
        assert node.send([("GET", "a"), ("GET", "b")]) == [DOWN, DOWN]
        assert node.backs_off_until == pytest.approx(clock.moment + pause)
    node.send([], 2.0)
    assert node.backs_off_until == clock.moment + 2
    assert node.send([]) == [1, 2]
    node.send([])
    assert node.backs_off_until == pytest.approx(clock.moment + 0.05)
    (error,) = node.send([("GET", "a")])  # of a client that fails in a way that redis-py knows nothing of
    assert type(error) is AttributeError


def test_a_node_carries_out_all_that_it_does_not_refuse(redis: Any, redis_url: str, key: str) -> None:
    """The commands of one trip are no transaction."""
    redis.set(key, "token")
    with Proxy(redis_url) as proxy, redis_py.Redis.from_url(proxy.url) as given:
        made = KeptConnections(given.connection_pool, SHORT_TIMEOUTS)
        refusal, reply = nodes.Node(made).send([("HGET", key, "a"), ("GET", key)])
        assert proxy.commands == ["HGET", "GET"]
    assert (type(refusal), reply) == (ResponseError, b"token")


def test_a_sentinel_is_asked_for_the_master_before_each_trip(clock: Clock) -> None:
    """One, and in a tenth of the time at the most: if it does not answer, other nodes have keys to renew."""
    asked: list[tuple[str, float]] = []

    class Asks(SimpleNamespace):
        def discover_master(self, _: str) -> tuple[str, int]:
            ((name, takes),) = self.sentinels
            asked.append((name, clock.moment - MOMENT))
            clock.moment += takes
            if takes:
                raise redis_py.TimeoutError
            return "h", 7

    pool = SimpleNamespace(service_name="m", master_address=("h", 7))
    pool.sentinel_manager = SentinelsInTurn(Asks(), [("frozen", 1.0), ("well", 0.0)])
    clients: Any = [Mock(connection_pool=pool), Mock()]
    node = nodes.MasterNode(*clients)
    for moment in (0, 1, 9, 10, 10, 11):
        clock.moment = MOMENT + moment
        node.send([])
    assert asked == [("frozen", 0), ("well", 10), ("well", 10), ("well", 11)]
    for address, closed in ((None, 0), (("h", 8), 1)):  # at first it has not connected yet
        pool.master_address = address
        node.send([])
        assert [each.leave_master.call_count for each in clients] == [closed] * 2


# Their connections


SHORT = {"socket_timeout": 0.5, "socket_connect_timeout": 0.25}
SHORTER = dict.fromkeys(SHORT, 0.125)


def of_sentinels(*_: object, **options: Any) -> Any:
    asks: Any = Sentinel
    kind: Any = SentinelConnectionPool
    return kind("mine", asks([("h", 7), ("h", 8)]), is_master=False, ssl=True, **options)


@pytest.mark.parametrize("url", ["redis://h:7/3", "rediss://h:7", "unix:///s"])
@pytest.mark.parametrize("make", [ConnectionPool.from_url, BlockingConnectionPool.from_url, of_sentinels])
@pytest.mark.parametrize(
    ("given", "made_of"),
    [({}, SHORT), ({"socket_timeout": None, "socket_connect_timeout": 9}, SHORT), (SHORTER, SHORTER)],
)
def test_a_pool_connects_as_the_user_s_does_and_that_for_the_thread_gives_up_soon(
    url: str, make: Callable[..., Any], given: dict[str, Any], made_of: dict[str, Any]
) -> None:
    pool = make(url, protocol=3, max_connections=1, timeout=None, **given)
    made, kind = own_pool(pool, SHORT_TIMEOUTS), SentinelConnectionPool if make is of_sentinels else ConnectionPool
    assert (type(made), made.max_connections > 1) == (kind, True)
    of_a_loop = asyncio_connections.KeptConnections(pool).connection_pool
    assert type(of_a_loop.make_connection()).__name__ == pool.connection_class.__name__
    for name in ("connection_class", "service_name"):
        assert getattr(made, name, None) == getattr(pool, name, None)
    assert getattr(made, "is_master", True)
    for name in ("host", "port", "db", "path"):
        assert made.connection_kwargs.get(name) == pool.connection_kwargs.get(name)
    assert {name: made.connection_kwargs[name] for name in SHORT} == made_of
    sentinels = [each.connection_pool for each in made.sentinel_manager.sentinels] if make is of_sentinels else []
    assert [each.connection_kwargs["port"] for each in sentinels] == [7, 8][: len(sentinels)]
    assert {each.connection_kwargs["socket_timeout"] for each in sentinels} <= {0.5}
    assert {each.connection_kwargs["retry"]._retries for each in (made, *sentinels)} == {0}


# A cluster, and what is learnt of its slots


class Told:
    """A cluster of the nodes a, b and c, with two slots each, and d, which has none. Keys are the numbers of slots.

    Attributes:
        says: what a node says to a command, such as "a GET"; if it is not here, then OK.
        asked: who was asked for what.
        theirs: the nodes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, says: dict[str, Any]) -> None:
        self.says = says
        self.asked: list[str] = []
        each = {host: SimpleNamespace(host=host, port=1) for host in "abcd"}
        manager = SimpleNamespace(connection_kwargs={}, nodes_cache=each, remap_host_port=lambda *address: address)
        manager.slots_cache = {slot: [each["abc"[slot // 2]]] for slot in range(6)}
        manager.create_redis_node = lambda host, _: SimpleNamespace(connection_pool=host)
        client: Any = SimpleNamespace(nodes_manager=manager, keyslot=int)
        self.slots = slots.Slots(client)
        self.theirs = nodes.ClusterNodes(self.slots, {})
        monkeypatch.setattr(nodes, "KeptConnections", lambda host, _: Mock(send=partial(self._answer, host)))
        monkeypatch.setattr(
            asyncio_connections, "KeptConnections", lambda host: AsyncMock(send_raw=partial(self._answer_async, host))
        )

    def _answer(self, host: str, commands: Sequence[Any]) -> list[Any]:
        came = [f"{host} {command[0]}" for command in commands]
        self.asked += came
        replies = [self.says.get(each, "OK") for each in came]
        for reply in replies:
            if reply in (DOWN, SILENT):
                raise reply
        return replies

    async def _answer_async(self, host: str, command: Any, *, is_asking: bool) -> Any:
        *_, reply = self._answer(host, [("ASKING",), command] if is_asking else [command])
        if isinstance(reply, Exception):
            raise reply
        return reply


SLOTS = [[3, 4, ["", 1, "id"]], [5, 5, ["e", 7, "id"]]]
"""As a node says it that does not know its own address."""

LOOKS = ["b CLUSTER", "c CLUSTER", "d CLUSTER"]
KNOW_NONE: dict[str, Any] = {look: [] for look in LOOKS}
RENEWALS: dict[str, tuple[dict[str, Any], str, list[str], dict[int, Any]]] = {
    "MOVED names the node for the next time": ({"a GET": MovedError("0 e:7")}, "", ["a GET"], {0: ("e", 7)}),
    "MOVED may name a port of the same host": ({"a GET": MovedError("0 :7")}, "", ["a GET"], {0: ("a", 7)}),
    "ASK sends it on": ({"a GET": AskError("0 b:1")}, "", ["a GET", "b ASKING", "b GET"], {}),
    "ASK does not while that node backs off": ({"a GET": AskError("0 b:1")}, "b", ["a GET"], {}),
    "a refusal of the key asks nobody": ({"a GET": ResponseError("WRONGTYPE")}, "", ["a GET"], {}),
    "who is down is not asked": ({"a GET": DOWN, **KNOW_NONE}, "", ["a GET", *LOOKS], {}),
    "who backs off is not asked": ({"a GET": DOWN, **KNOW_NONE}, "bd", ["a GET", "c CLUSTER"], {}),
    "the first that knows is enough": (
        {"a GET": DOWN, "b CLUSTER": DOWN, "c CLUSTER": SLOTS},
        "",
        ["a GET", "b CLUSTER", "c CLUSTER"],
        {3: ("c", 1), 4: ("c", 1), 5: ("e", 7)},
    ),
    "a replica is asked last": (
        {"a GET": redis_py.ReadOnlyError(), **KNOW_NONE, "a CLUSTER": SLOTS},
        "",
        ["a GET", *LOOKS, "a CLUSTER"],
        {3: ("a", 1), 4: ("a", 1), 5: ("e", 7)},
    ),
    "who has left the cluster is asked last": (
        {"a GET": ClusterDownError(""), **KNOW_NONE, "a CLUSTER": []},
        "",
        ["a GET", *LOOKS, "a CLUSTER"],
        {},
    ),
}


@pytest.mark.parametrize(("says", "resting", "asked", "learnt"), RENEWALS.values(), ids=RENEWALS)
@pytest.mark.usefixtures("clock")
def test_what_a_renewal_learns_of_slots(
    monkeypatch: pytest.MonkeyPatch, says: dict[str, Any], resting: str, asked: list[str], learnt: dict[int, Any]
) -> None:
    told = Told(monkeypatch, says)
    owners = dict(told.slots.owners)
    assert len({*map(id, owners.values())}) == 3  # not a megabyte of tuples
    for host in resting:
        told.theirs.at((host, 1)).fail(2.0)
    is_sent_on = "b GET" in asked
    assert told.theirs.node_of("0").send([("GET", "0")]) == ["OK" if is_sent_on else says["a GET"]]
    assert told.asked == asked
    assert told.slots.owners == {**owners, **learnt}


REFUSED = 16
ASKED = ["a GET", *LOOKS, "a CLUSTER"]
CALLS: dict[str, tuple[str, dict[str, Any], list[str], float]] = {
    "a slot that nobody is known to have": ("6", {}, ["a GET"], 0),
    "each says that the other has it": (
        "0",
        {"a GET": MovedError("0 b:1"), "b GET": MovedError("0 a:1")},
        ["a GET", "b GET"] * (REFUSED // 2),
        0,
    ),
    "ASK sends it on": ("0", {"a GET": AskError("0 b:1")}, ["a GET", "b ASKING", "b GET"], 0),
    "TRYAGAIN while it moves": ("0", {"a GET": TryAgainError("")}, ["a GET"] * REFUSED, 2.1),
    "CLUSTERDOWN of who was restarted": (
        "0",
        {"a GET": ClusterDownError(""), **KNOW_NONE, "a CLUSTER": []},
        [*ASKED, *["a GET"] * (REFUSED - 1)],
        2.1,
    ),
    "one of the nodes times out": ("0", {"a GET": SILENT, **KNOW_NONE, "a CLUSTER": SILENT}, ASKED, 0),
    "all nodes time out": ("0", dict.fromkeys(ASKED, SILENT), ASKED, 0),
}


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("slot", "says", "asked", "waits"), CALLS.values(), ids=CALLS)
def test_a_call_is_sent_on_and_waits_for_as_long_as_a_node_may_refuse_all_commands(
    monkeypatch: pytest.MonkeyPatch, slot: str, says: dict[str, Any], asked: list[str], waits: float, *, is_async: bool
) -> None:
    """Which is two seconds, as redis-py's clients know, too; and no longer. If all time out, it is not sent again."""
    told, pauses = Told(monkeypatch, says), [0.0]
    monkeypatch.setattr(asyncio, "sleep", AsyncMock(side_effect=pauses.append))
    monkeypatch.setattr(nodes, "time", SimpleNamespace(sleep=pauses.append))
    if slot not in told.slots.owners:
        told.slots.owners.clear()
    connections, of_calls = asyncio_connections.ClusterConnections(told.slots), nodes.ClusterNodes(told.slots, {}, 0.0)
    call: Any = connections if is_async else of_calls

    def ask() -> Any:
        reply: Any = call.send_raw(("GET", slot))
        return asyncio.run(reply) if is_async else reply

    if isinstance(says.get(asked[-1]), Exception):
        with pytest.raises(type(says["a GET"])) as raised:
            ask()
        assert (raised.type is ServerTimeout) == (says.get("d CLUSTER") is SILENT)
    else:
        assert ask() == "OK"
    assert told.asked == asked
    assert sum(pauses) == pytest.approx(waits)
