"""A real cluster of three masters: nodes that freeze and die, and slots that move, while runs hold keys in them."""

from __future__ import annotations

import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisClusterException, RedisError
from redis.retry import Retry

from only_one import LockLost, LockUnavailable, configure, only_one, skip
from only_one.clock import now
from only_one.connections import cluster as clusters
from only_one.connections import node as nodes
from only_one.connections import server as servers
from only_one.inspection import held, release_key
from only_one.lock import renewal
from only_one.lock.pending_releases import PendingRelease
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests.faults.programs import SLACK, Holder, Running, RunningAsync
from tests.proxy import Proxy
from tests.renewal import MOMENT, Clock, fails_to_renew, later, renew_now

# The nodes do not find each other lost by themselves: on a slow machine, one that is well may be late by any time.
OPTIONS = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "3600000"),
    *("--cluster-require-full-coverage", "no"),
    *("--repl-diskless-sync-delay", "0"),
)

CERTIFICATE = Path(__file__).with_name("tls.pem")

CAN_BE_SHARED = tuple(map(int, redis_py.__version__.split(".")[:2])) >= (7, 2)
"""Before redis-py 7.2 a cluster's client that looks for slots closes connections under other threads."""

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


class Node:
    """One master, asked directly: the witness of what stands in it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.client: Any = redis_py.Redis.from_url(server.url, socket_timeout=LIMIT, socket_connect_timeout=LIMIT)
        self.id: bytes = self.call("CLUSTER MYID")

    def call(self, *command: Any) -> Any:
        """What it answers, for slots that it is about to get, too."""
        pipeline = self.client.pipeline(transaction=False)
        pipeline.execute_command("ASKING")
        pipeline.execute_command(*command)
        return pipeline.execute()[1]


class Cluster:
    """Three masters.

    Attributes:
        nodes: the masters.
        client: a client of them all.
    """

    client: Any

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        servers = [stack.enter_context(redis_server(*OPTIONS)) for _ in range(3)]
        self.nodes = [Node(server) for server in servers]
        bounds = [0, 5461, 10923, 16384]
        for number, node in enumerate(self.nodes):
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
            node.client.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port)

    def is_well(self) -> bool:
        """Whether all nodes see all others, and all slots."""
        with suppress(RedisError):
            states = [node.client.execute_command("CLUSTER INFO") for node in self.nodes]
            lists = [str(node.client.execute_command("CLUSTER NODES")) for node in self.nodes]
            return not any("fail" in each for each in lists) and all(
                (state["cluster_state"], state["cluster_slots_ok"], int(state["cluster_known_nodes"]))
                == ("ok", "16384", len(self.nodes))
                for state in states
            )
        return False

    def connect(self, **options: Any) -> Any:
        """A client as users have it."""
        options = {"socket_timeout": LIMIT, "socket_connect_timeout": LIMIT, **options}
        found: list[Any] = []

        def try_to() -> bool:
            with suppress(RedisClusterException, RedisError):
                found.append(redis_py.RedisCluster("127.0.0.1", self.nodes[0].server.port, **options))
            return bool(found)

        assert eventually(try_to)
        return found[0]

    def owner(self, slot: int) -> Node:
        """The node that has a slot."""
        for begin, end, (_, port, *_), *_ in self.nodes[0].client.execute_command("CLUSTER SLOTS"):
            if begin <= slot <= end:
                return next(node for node in self.nodes if node.server.port == port)
        raise AssertionError(slot)

    def name_on(self, node: Node, prefix: str, begins: str = "k") -> str:
        """A name whose key is kept by a node."""
        names = (f"{begins}{number}" for number in itertools.count())
        return next(name for name in names if self.owner(key_slot(f"{prefix}{name}".encode())) is node)

    def begin_to_move(self, slot: int, source: Node, target: Node, *keys: str) -> None:
        """Move keys of a slot; whoever asks for them is sent on by ASK until `finish_moving`."""
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        for key in keys:
            source.client.execute_command("MIGRATE", "127.0.0.1", target.server.port, key, 0, 2000)

    def finish_moving(self, slot: int, source: Node, target: Node) -> None:
        """The slot is the target's now; whoever asks the source is sent on by MOVED."""
        for node in (target, source, *self.nodes):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)

    def replica_of(self, master: Node) -> Node:
        """A new node that follows a master, and is known to all."""
        replica = Node(self._stack.enter_context(redis_server(*OPTIONS)))
        replica.client.execute_command("CLUSTER MEET", "127.0.0.1", master.server.port)

        def follows() -> bool:
            with suppress(redis_py.ResponseError):  # it has not met its master yet
                replica.client.execute_command("CLUSTER REPLICATE", master.id)
                return True
            return False

        def is_known(node: Node) -> bool:
            slots = node.client.execute_command("CLUSTER SLOTS")
            return replica.server.port in {port for _, _, *nodes in slots for _, port, *_ in nodes}

        assert eventually(follows)
        assert eventually(lambda: replica.client.info("replication").get("master_link_status") == "up")
        assert eventually(lambda: all(is_known(node) for node in self.nodes))
        return replica

    def put_in_place_of(self, lost: Node, replica: Node) -> None:
        """Have a replica take over from a master that is lost, and be one of the three."""
        replica.client.execute_command("CLUSTER FAILOVER TAKEOVER")
        assert eventually(lambda: replica.client.info("replication")["role"] == "master")
        self.nodes[self.nodes.index(lost)] = replica

    def forget(self, lost: Node) -> None:
        """Have all others forget a node."""
        for node in self.nodes:
            node.client.execute_command("CLUSTER FORGET", lost.id)


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def cluster(three: Cluster, prefix: str) -> Iterator[Cluster]:
    """The cluster, which is well; what a test covers takes its keys there."""
    assert prefix
    assert eventually(three.is_well)
    three.client = three.connect()
    with configure(redis=three.client):
        yield three
    three.client.close()


@pytest.fixture
def names(cluster: Cluster, prefix: str) -> list[str]:
    """A name for each node, whose key is kept there."""
    return [cluster.name_on(node, prefix) for node in cluster.nodes]


def is_renewed(ask: Callable[..., Any], lock: Any) -> bool:
    """Whether the time that a key is to live is lengthened where it is now, as its node says."""
    assert ask("PEXPIRE", lock.key, 30_000) == 1
    renew_now(lock)
    return eventually(lambda: ask("PTTL", lock.key) > 30_000)


def freeze(server: RedisServer) -> Callable[[], None]:
    server.pause()
    return server.resume


def kill(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return server.start


@both
def test_what_a_run_does_in_a_cluster(cluster: Cluster, names: list[str], prefix: str, kind: type[Running]) -> None:
    node, name = cluster.nodes[1], names[1]
    key = f"{prefix}{name}"
    with kind(name, timeout=60) as run:
        first = run.lock.fence
        assert only_one(lambda: "other", key=name)() is None
        run.lock.extend(600)
        assert 60_000 < node.client.pttl(key) <= 660_000
    assert not node.client.exists(key)
    node.client.script_flush()
    with kind(name, lease=60, timeout=600, at_least=600) as run:
        assert node.client.get(key) == run.lock.token
        assert is_renewed(node.call, run.lock)
        assert run.lock.fence > first
    assert int(node.client.get(f"{{{key}}}:fence")) == run.lock.fence
    assert b'"kept"' in node.client.get(key)
    assert 60_000 < node.client.pttl(key) <= 600_000
    node.client.delete(key)
    with kind(name) as run:
        node.client.set(key, "somebody else")
        with pytest.raises(LockLost, match="taken"):
            _ = run.lock.fence
    assert node.client.get(key) == b"somebody else"
    node.client.delete(key)


@both
def test_a_cluster_behind_other_addresses_that_speaks_tls(prefix: str, kind: type[Running]) -> None:
    """The clients that are made from the user's are told of both, and whom to trust."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    with redis_server(*OPTIONS) as server, Proxy(server.url, tls=context) as proxy:
        node = Node(server)
        node.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        assert eventually(lambda: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        client: Any = redis_py.RedisCluster.from_url(
            proxy.url.replace("redis:", "rediss:"),
            ssl_ca_certs=str(CERTIFICATE),
            address_remap=lambda _: ("127.0.0.1", proxy.port),
            socket_timeout=LIMIT,
        )
        with client, kind(lease=60, redis=client) as run:
            assert node.client.get(run.lock.key) == run.lock.token
            assert is_renewed(node.call, run.lock)
        assert run.result == "done"
        assert not node.client.exists(f"{prefix}k")
        assert {"SET", "EVAL"} <= set(proxy.commands)


def test_many_tokens_of_unknown_fate(cluster: Cluster, names: list[str], prefix: str) -> None:
    """They are released in one trip to each node, as leases are renewed; here by the script, which no node has."""
    keys = [f"{prefix}{name}" for name in names]
    server = servers.find_server(cluster.client)
    for key in keys:
        server.node_of(key).fail(LIMIT)
        for number in range(200):
            name = f"{{{key}}}{number}"
            cluster.client.set(name, name)
            renewal.release_later(
                PendingRelease(server, name, name.encode(), now() + 2 * LIMIT, no_write_in_flight=True)
            )
    reads = [node.client.info("stats")["total_reads_processed"] for node in cluster.nodes]
    with later(LIMIT):
        assert eventually(
            lambda: not any(each.server is server for each in list(renewal._renewer.pending_releases.values()))
        )
    for node, before in zip(cluster.nodes, reads, strict=True):
        assert node.client.info("stats")["total_reads_processed"] - before < 100
        assert not list(node.client.scan_iter(match=f"*{prefix}*", count=1000))


# Nodes that do not answer


@pytest.mark.parametrize("fault", [freeze, kill], ids=["frozen", "killed"])
def test_a_lost_master_costs_no_lease_on_the_others(
    cluster: Cluster, names: list[str], prefix: str, fault: Callable[[RedisServer], Callable[[], None]]
) -> None:
    told: list[tuple[str, str]] = []

    def tell(lost: Any) -> None:
        told.append((lost.key.removeprefix(prefix), lost.reason))

    first, second, lost = cluster.nodes
    overdue = cluster.name_on(lost, prefix, "overdue")
    with (
        Running(names[0], lease=60, when_lost=tell) as thread,
        RunningAsync(names[1], lease=60, when_lost=tell) as loop,
        Running(names[2], lease=60, when_lost=tell) as waits,
        RunningAsync(overdue, lease=60, when_lost=tell) as ends,
    ):
        runs = [thread, loop, waits, ends]
        before = [run.lock.expires_at for run in runs]
        kept = list(zip(runs[:2], before, strict=False))
        repair = fault(lost.server)
        try:
            assert fails_to_renew(waits.lock)
            renew_now(*(run.lock for run in runs))
            assert eventually(lambda: all(run.lock.expires_at > was for run, was in kept))
            assert [run.lock.expires_at for run in runs[2:]] == before[2:]
            assert told == []
            ends.lock.expires_at = now()
            renew_now(ends.lock)
            assert eventually(lambda: told)
            assert is_renewed(first.call, thread.lock)
            assert is_renewed(second.call, loop.lock)
            assert told == [(overdue, "expired")]
        finally:
            repair()
        # It is asked again as soon as it is back, and may know nothing.
        assert eventually(cluster.is_well)
        if fault is freeze:
            assert is_renewed(lost.call, waits.lock)
        else:
            renew_now(waits.lock)
            assert eventually(lambda: len(told) > 1)
            with Running(overdue, lease=60) as again:
                assert is_renewed(lost.call, again.lock)
    assert [run.result for run in runs] == ["done"] * 4
    assert told == [(overdue, "expired")] + [(names[2], "deleted")] * (fault is kill)
    assert not any(node.client.exists(f"{prefix}{name}") for node, name in zip(cluster.nodes, names, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "fault"), [(Running, freeze), (RunningAsync, kill)], ids=["frozen", "killed"])
def test_a_lost_master_costs_no_short_lease_on_the_others(
    cluster: Cluster,
    names: list[str],
    kind: type[Running],
    fault: Callable[[RedisServer], Callable[[], None]],
    record_property: Callable[[str, object], None],
) -> None:
    """A renewal may wait for the one node that does not answer, and others are not to wait for that."""
    lease = 1.5
    told: list[float] = []
    with ExitStack() as stack:
        runs = [
            stack.enter_context(kind(name, lease=lease, when_lost=lambda _: told.append(time.monotonic())))
            for name in names
        ]
        repair = fault(cluster.nodes[2].server)
        begun = time.monotonic()
        try:
            assert not eventually(lambda: not all(run.lock.is_held for run in runs[:2]), 4 * lease)
            assert not runs[2].lock.is_held
        finally:
            repair()
    (moment,) = told
    record_property("seconds until the loss was told", round(moment - begun, 3))
    assert moment - begun < lease + SLACK


def test_a_frozen_master_does_not_delay_what_is_left_on_another(
    cluster: Cluster, names: list[str], prefix: str
) -> None:
    """Tokens of unknown fate are released on the one while the other does not answer."""
    back, frozen, healthy = cluster.nodes
    hasty = {"retry": Retry(NoBackoff(), 0), "socket_timeout": 2}
    clients = [cluster.connect(**hasty) for _ in range(2)]  # redis-py 5's bears no two threads
    calls = [
        only_one(lambda: "done", key=name, lease=600, redis=client, when_down=skip)
        for name, client in zip(names, clients, strict=False)
    ]
    assert [call() for call in calls] == ["done"] * 2
    before = back.client.info("commandstats")["cmdstat_set"]["calls"]
    with Running(names[2], lease=60) as run:
        back.server.pause()
        frozen.server.pause()
        try:
            threads = [threading.Thread(target=call) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            back.server.resume()
            # It carries out what it was sent, and that is released while the other still does not answer.
            assert eventually(lambda: back.client.info("commandstats")["cmdstat_set"]["calls"] > before)
            assert eventually(lambda: not back.client.exists(f"{prefix}{names[0]}"))
            assert is_renewed(healthy.call, run.lock)
        finally:
            back.server.resume()
            frozen.server.resume()
    assert run.result == "done"
    assert eventually(lambda: not frozen.client.exists(f"{prefix}{names[1]}"))
    for client in clients:
        client.close()


# What the thread that renews knows of the slots


def slots_of(cluster: Cluster) -> dict[int, tuple[str, int]]:
    """Which node has which slot, as the nodes say."""
    found = cluster.nodes[0].client.execute_command("CLUSTER SLOTS")
    return {slot: ("127.0.0.1", port) for begin, end, (_, port, *_), *_ in found for slot in range(begin, end + 1)}


def test_what_is_learnt_of_the_slots(cluster: Cluster, names: list[str], prefix: str) -> None:
    """By MOVED, of all slots that have moved; by ASK nothing."""
    (source, target, _), (name, *_) = cluster.nodes, names
    key, beside = f"{prefix}{name}", f"{{{prefix}{name}}}beside"
    slot, other = key_slot(key.encode()), key_slot(cluster.name_on(source, "").encode())
    assert slot != other
    theirs = clusters.ClusterNodes(cluster.connect())
    known = slots_of(cluster)
    assert theirs._owners == known
    assert {node.client.connection_pool.connection_kwargs["port"] for node in theirs._nodes.values()} == {
        node.server.port for node in cluster.nodes
    }
    asked = [("SET", key, "1"), ("SET", beside, "2")]
    node = theirs.of(key)
    assert node.send(asked, {}) == [True, True]
    cluster.begin_to_move(slot, source, target, key, beside)
    assert node.send([("GET", key), ("GET", beside)], {}) == [b"1", b"2"]
    assert theirs._owners == known
    cluster.finish_moving(slot, source, target)
    cluster.begin_to_move(other, source, target)
    cluster.finish_moving(other, source, target)
    assert [type(reply) for reply in node.send([("GET", key), ("GET", beside)], {})] == [MovedError] * 2
    assert theirs.of(key).send([("GET", key), ("GET", beside)], {}) == [b"1", b"2"]
    assert theirs._owners == slots_of(cluster) == {**known, **dict.fromkeys([slot, other], known_as(target))}
    target.client.delete(key, beside)


def known_as(node: Node) -> tuple[str, int]:
    """Its address."""
    return "127.0.0.1", node.server.port


class Said:
    """What nodes say that none can be brought to say, or not in time, in the place of what they do; by a still clock.

    Attributes:
        theirs: the nodes as the thread that renews knows them.
        replies: by port, what each node answers to each command.
        asked: who was asked for what.
    """

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch, nodes)
        self.theirs = clusters.ClusterNodes(cluster.client)
        self.replies: dict[int, Callable[[str], Any]] = {}
        self.asked: list[tuple[int, str]] = []
        self.names = [self.theirs._at(known_as(node)) for node in cluster.nodes]

        def send_here(node: nodes.Node, commands: Any, _options: Any, pause: float | None = None) -> list[Any]:
            return self._send(node, commands, pause)

        monkeypatch.setattr(nodes.Node, "send_here", send_here)

    def _send(self, node: nodes.Node, commands: Any, pause: float | None) -> list[Any]:
        port = self.port(node)
        self.asked += [(port, command[0]) for command in commands]
        found = [self.replies[port](command[0]) for command in commands]
        if any(isinstance(reply, redis_py.ConnectionError) for reply in found):
            node.fail(pause)
        return found

    def port(self, node: nodes.Node) -> int:
        """Where it is."""
        port: int = node.client.connection_pool.connection_kwargs["port"]
        return port

    def send(self, number: int, *commands: str) -> list[Any]:
        """What comes of commands that are sent to a node, and `asked` anew."""
        self.asked.clear()
        node = self.names[number]
        return node.send([(command,) for command in commands], {}, 2.0)


@pytest.fixture
def said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(cluster, monkeypatch)


def test_nodes_that_send_on_to_each_other(said: Said) -> None:
    """They are not asked for ever: where a slot has moved is learnt, and asked the next time."""
    one, other = (said.port(node) for node in said.names[:2])
    said.replies[one] = lambda _: MovedError(f"5 127.0.0.1:{other}")
    said.replies[other] = lambda _: MovedError(f"5 :{one}")
    for number, asked, said_to_have in ((0, one, other), (1, other, one)):
        (reply,) = said.send(number, "GET")
        assert isinstance(reply, MovedError)
        assert [port for port, command in said.asked if command == "GET"] == [asked]
        # One that does not say where means itself.
        assert said.theirs._owners[5] == ("127.0.0.1", said_to_have)
    assert len(said.theirs._nodes) == 3


def test_a_slot_that_moves_to_a_node_that_cannot_be_reached(said: Said) -> None:
    one, other = (said.port(node) for node in said.names[:2])
    said.replies[one] = lambda name: AskError("5 away:7") if name == "ASKED" else MovedError(f"5 127.0.0.1:{other}")
    said.replies[other] = lambda _: redis_py.ConnectionError()
    # It is asked for the slots, once, and no other besides.
    for asked in ([(one, "GET"), (other, "CLUSTER SLOTS")], [(one, "GET")]):
        (reply,) = said.send(0, "GET")
        assert isinstance(reply, MovedError)
        assert said.asked == asked
        assert said.theirs._owners[5] == ("127.0.0.1", other)
    assert said.names[1].backs_off_until == pytest.approx(MOMENT + 0.05)
    # Where ASK sends to is not where the slot is.
    away = said.theirs._at(("away", 7))
    away.fail(2.0)
    (reply,) = said.send(0, "ASKED")
    assert type(reply) is AskError
    said.replies[7] = lambda name: "done" if name == "ASKED" else "OK"
    said.clock.moment += 2
    assert said.send(0, "ASKED") == ["done"]
    assert said.asked == [(one, "ASKED"), (7, "ASKING"), (7, "ASKED")]
    assert said.theirs._owners[5] == ("127.0.0.1", other)


@pytest.mark.parametrize("error", [redis_py.ConnectionError(), redis_py.ReadOnlyError()], ids=["down", "replica"])
def test_a_node_that_may_have_been_replaced(said: Said, error: Exception) -> None:
    """Another is asked which has which slot, one that could be reached, before that one is asked again."""
    one, other, third = (said.port(node) for node in said.names)
    said.replies[one] = lambda command: 1 if command == "GET" else error
    said.replies[other] = lambda _: redis_py.ConnectionError()
    said.replies[third] = lambda _: [[3, 5, ["", 7, "id"]], [9, 9, ["127.0.0.1", other, "id"]]]
    assert said.send(0, "GET") == [1]
    assert said.asked == [(one, "GET")]
    owners = dict(said.theirs._owners)
    said.names[1].backs_off_until = -1.0  # of those that may be asked, one that cannot be reached after all
    assert said.send(0, "GET", "SET") == [1, error]
    assert said.asked == [(one, "GET"), (one, "SET"), (other, "CLUSTER SLOTS")]
    assert said.theirs._owners == owners

    said.names[1].backs_off_until, said.names[2].backs_off_until = MOMENT + 2, MOMENT + 1
    assert said.send(0, "SET") == [error]  # all that are left rest
    assert said.asked == [(one, "SET")]
    assert said.theirs._owners == owners

    said.names[2].backs_off_until = MOMENT
    assert said.send(0, "SET") == [error]
    assert said.asked == [(one, "SET"), (third, "CLUSTER SLOTS")]
    assert said.theirs._owners == {**owners, **dict.fromkeys([3, 4, 5], ("127.0.0.1", 7)), 9: ("127.0.0.1", other)}
    assert ("127.0.0.1", 7) in said.theirs._nodes


def test_an_error_that_says_something_of_the_key_is_no_reason_to_look_elsewhere(said: Said) -> None:
    said.replies[said.port(said.names[0])] = lambda _: redis_py.ResponseError("WRONGTYPE")
    for _ in range(2):
        said.send(0, "GET")
        assert len(said.asked) == 1


def test_a_slot_that_nobody_is_known_to_have(said: Said) -> None:
    """The node that could be reached for the longest time is asked, and will know."""
    for number, node in enumerate(said.names):
        node.backs_off_until = MOMENT - number
    said.theirs._owners.clear()
    assert said.theirs.of("k") is said.names[2]


def test_a_cluster_of_one(said: Said) -> None:
    """There is nobody else to be asked."""
    node = said.names[0]
    said.theirs._nodes = {("127.0.0.1", said.port(node)): node}
    said.replies[said.port(node)] = lambda _: redis_py.ConnectionError()
    for _ in range(3):
        said.send(0, "GET")
        assert len(said.asked) == 1


def test_the_connections_of_the_thread_that_renews(cluster: Cluster) -> None:
    theirs = clusters.ClusterNodes(cluster.client)
    for node in theirs._nodes.values():
        options = node.client.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.5, 0.25)
        assert options["retry"]._retries == 0
    notices = getattr(cluster.client.nodes_manager, "maint_notifications_config", None)
    told = theirs._options.get("maint_notifications_config")
    assert (told is None) == (notices is None)
    assert told is None or told.enabled is False


# Slots that move


def moved(node: Node) -> int:
    """How often a node has said MOVED."""
    count: int = node.client.info("errorstats").get("errorstat_MOVED", {"count": 0})["count"]
    return count


@both
def test_a_slot_that_moves_during_a_run(cluster: Cluster, names: list[str], prefix: str, kind: type[Running]) -> None:
    """By ASK while it moves, and then by MOVED: renewals, more time, fencing tokens, other callers and the release."""
    told: list[object] = []
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    slot = key_slot(key.encode())
    with kind(name, lease=60, timeout=600, when_lost=told.append) as run:
        first = run.lock.fence
    with kind(name, lease=60, timeout=600, when_lost=told.append) as run:
        cluster.begin_to_move(slot, source, target, key, f"{{{key}}}:fence")
        try:
            assert target.call("GET", key) == run.lock.token
            assert is_renewed(target.call, run.lock)
            assert is_renewed(target.call, run.lock)
            run.lock.extend(30)
            assert run.lock.fence > first
            assert only_one(lambda: "other", key=name)() is None
            assert run.lock.is_held
        finally:
            cluster.finish_moving(slot, source, target)
        assert is_renewed(target.client.execute_command, run.lock)
        # It has learnt where the slot is, and does not ask the old node first.
        sent_on = moved(source)
        assert is_renewed(target.client.execute_command, run.lock)
        assert is_renewed(target.client.execute_command, run.lock)
        assert moved(source) == sent_on > 0
        run.lock.extend(30)
        assert only_one(lambda: "other", key=name)() is None
    assert run.result == "done"
    assert told == []
    assert not target.client.exists(key)
    assert only_one(lambda: "next", key=name)() == "next"


@both
@pytest.mark.parametrize("until", ["begun", "finished"])
def test_a_run_that_ends_when_its_slot_has_moved(
    cluster: Cluster, names: list[str], prefix: str, kind: type[Running], until: str
) -> None:
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    slot = key_slot(key.encode())
    with kind(name, lease=60) as run:
        cluster.begin_to_move(slot, source, target, key)
        if until == "finished":
            cluster.finish_moving(slot, source, target)
        assert target.call("GET", key) == run.lock.token
    gone = not target.call("EXISTS", key)
    cluster.finish_moving(slot, source, target)
    assert run.result == "done"
    assert gone


def test_a_dead_holder_whose_slot_has_moved(cluster: Cluster, names: list[str], prefix: str) -> None:
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    slot = key_slot(key.encode())
    with Holder(source.server.url, prefix, key=name, timeout=600) as holder:
        cluster.begin_to_move(slot, source, target, key)
        cluster.finish_moving(slot, source, target)
        call = only_one(lambda: "done", key=name, timeout=600)
        assert call() is None
        holder.kill()
    assert target.client.get(key) == holder.token
    assert call() == "done"
    assert not target.client.exists(key)


def test_runs_exclude_each_other_while_their_slot_moves(
    cluster: Cluster, names: list[str], prefix: str, redis_url: str
) -> None:
    """Of two clients that are shared, or of four; seen by a counter in another server, which knows nothing of locks."""
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    slot = key_slot(key.encode())
    seen: list[int] = []
    enough = threading.Event()
    clients = [cluster.connect() for _ in range(2 if CAN_BE_SHARED else 4)]

    with redis_py.Redis.from_url(redis_url) as witness:

        def work() -> None:
            seen.append(witness.incr(f"{prefix}witness"))
            time.sleep(0.001)
            witness.decr(f"{prefix}witness")

        calls = [only_one(work, key=name, lease=60, redis=client) for client in clients]

        def go_on(call: Callable[[], None]) -> None:
            while not enough.is_set():
                with suppress(LockUnavailable):
                    call()

        threads = [threading.Thread(target=go_on, args=(calls[number % len(calls)],)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            for one, other in [(source, target), (target, source)] * 2:
                cluster.begin_to_move(slot, one, other, key)
                begun = len(seen)
                assert eventually(lambda begun=begun: len(seen) > begun + 10)  # type: ignore[misc]
                cluster.begin_to_move(slot, one, other, key)
                cluster.finish_moving(slot, one, other)
                begun = len(seen)
                assert eventually(lambda begun=begun: len(seen) > begun + 10)  # type: ignore[misc]
        finally:
            enough.set()
            for thread in threads:
                thread.join(LIMIT)
        witness.delete(f"{prefix}witness")
    for client in clients:
        client.close()
    print(f"{len(seen)} runs during 4 moves")
    assert set(seen) == {1}


def test_all_nodes_are_looked_at(cluster: Cluster, names: list[str], prefix: str) -> None:
    keys = {f"{prefix}{name}" for name in names}
    for key in keys:
        cluster.client.set(key, "x", px=60_000)

    assert {each.key for each in held()} == keys
    assert all(release_key(key, "x") for key in keys)
    assert not list(held())


# Replicas


def test_a_replica_that_takes_over_during_a_run(cluster: Cluster, names: list[str], prefix: str) -> None:
    """What the master had passed on is renewed at the new one, though nobody that is alive ever said MOVED."""
    told: list[object] = []
    (master, *_), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    replica = cluster.replica_of(master)
    with Running(name, lease=600, when_lost=told.append) as run:
        master.client.wait(1, round(LIMIT * 1000))
        assert replica.client.info("keyspace")  # only the slot's master answers for the key itself
        master.server.kill()
        cluster.put_in_place_of(master, replica)
        assert is_renewed(replica.client.execute_command, run.lock)
        assert replica.client.get(key) == run.lock.token
        assert run.lock.fence > 0
    assert (run.result, told) == ("done", [])
    assert eventually(lambda: not replica.client.exists(key))
    assert only_one(lambda: "next", key=name)() == "next"
    cluster.forget(master)
