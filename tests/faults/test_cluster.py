"""A real cluster of three masters: nodes that freeze and die, and slots that move, while runs hold keys in them."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis as redis_py
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError

from only_one import LockUnavailable, configure, only_one
from only_one.connections import asyncio_connections, nodes, slots
from only_one.connections.server import find_server
from only_one.inspection import held, holder_of, key_of, release_key
from rigs.proxy import Proxy
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests import renewal
from tests.decorated import CLOSED, Decorate, both, decorated_async
from tests.faults.programs import Holder, Running, RunningAsync
from tests.faults.test_fork import FORK
from tests.interruptions import Interruption, while_handling
from tests.renewal import MOMENT, Clock, fails_to_renew, renew_now

# The nodes do not find each other lost by themselves: on a slow machine, one that is well may be late by any time.
OPTIONS = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "3600000"),
    *("--cluster-require-full-coverage", "no"),
    *("--repl-diskless-sync-delay", "0"),
)

CERTIFICATE = Path(__file__).with_name("tls.pem")


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
            names = ("cluster_state", "cluster_slots_ok", "cluster_known_nodes")
            return all([state[name] for name in names] == ["ok", "16384", "3"] for state in states)
        return False

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Once it is well, what a test decorates acquires its keys there, by a client as users have it."""
        assert eventually(self.is_well)
        port = self.nodes[0].server.port
        self.client = redis_py.RedisCluster("127.0.0.1", port, socket_timeout=LIMIT, socket_connect_timeout=LIMIT)
        with self.client, configure(redis=self.client):
            yield

    def name_on(self, node: Node, prefix: str) -> str:
        """A name whose key is kept by a node."""
        names = (f"k{number}" for number in itertools.count())
        return next(name for name in names if self.client.get_node_from_key(f"{prefix}{name}").port == node.server.port)

    def replica_of(self, master: Node) -> Node:
        """A new node that follows a master, and is known to all."""
        replica = self.joins()

        def follows() -> bool:
            with suppress(redis_py.ResponseError):  # it has not met its master yet
                replica.client.execute_command("CLUSTER REPLICATE", master.id)
                return True
            return False

        def is_known(node: Node) -> bool:
            slots = node.client.execute_command("CLUSTER SLOTS")
            return replica.server.port in {port for _, _, *nodes in slots for _, port, *_ in nodes}

        assert eventually(follows)
        assert eventually(lambda: all(is_known(node) for node in self.nodes))
        return replica

    @contextmanager
    def node_without_slots(self) -> Iterator[Node]:
        """A new node, until it is forgotten."""
        node = self.joins()
        try:
            yield node
        finally:
            for each in self.nodes:
                each.client.execute_command("CLUSTER FORGET", node.id)

    def joins(self) -> Node:
        """A new node, which meets all others."""
        node = Node(self._stack.enter_context(redis_server(*OPTIONS)))
        node.client.execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].server.port)
        addresses = {f"127.0.0.1:{each.server.port}" for each in [node, *self.nodes]}

        def knows_all(each: Node) -> bool:
            """Whether it sees all as masters, and none still shakes hands."""
            known = each.call("CLUSTER NODES").items()
            return addresses <= {address for address, seen in known if "master" in seen["flags"]}

        assert eventually(lambda: all(map(knows_all, [node, *self.nodes])))
        return node


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def cluster(three: Cluster) -> Iterator[Cluster]:
    """The cluster, in which what a test decorates acquires its keys."""
    with three.connected():
        yield three


@pytest.fixture
def names(cluster: Cluster, prefix: str) -> list[str]:
    """A name for each node, whose key is kept there."""
    return [cluster.name_on(node, prefix) for node in cluster.nodes]


def is_renewed(ask: Callable[..., Any], lock: Any) -> bool:
    """Whether the time that a key is to live is lengthened where it is now, as its node says."""
    assert ask("PEXPIRE", lock.key, 30_000) == 1
    return bool(renewal.is_renewed(lock) and ask("PTTL", lock.key) > 30_000)


def test_a_cluster_that_speaks_tls_and_lacks_a_slot_behind_other_addresses(prefix: str, kind: type[Running]) -> None:
    """The clients that are made from the user's are told of that, whom to trust, and which nodes were given."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATE)
    with redis_server(*OPTIONS) as server, Proxy(server.url, tls=context) as proxy:
        node = Node(server)
        missing = (key_slot(f"{prefix}k".encode()) + 1) % 16384
        node.client.execute_command("CLUSTER ADDSLOTS", *(slot for slot in range(16384) if slot != missing))
        assert eventually(lambda: node.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        connect: Any = partial(
            redis_py.RedisCluster,
            "127.0.0.1",
            proxy.port,
            ssl=True,
            ssl_ca_certs=str(CERTIFICATE),
            address_remap=lambda _: ("127.0.0.1", proxy.port),
            require_full_coverage=False,
            socket_timeout=LIMIT,
        )
        with connect() as client, kind(lease=60, redis=client) as run:
            assert node.client.get(run.lock.key) == run.lock.token
            assert is_renewed(node.call, run.lock)
        assert not node.client.exists(f"{prefix}k")
        assert {"SET", "DELIFEQ"} <= set(proxy.commands)
        with connect() as client:
            find_server(client).looked_at_from = math.inf
            if is_lost := hasattr(client, "startup_nodes"):
                gone, known = SimpleNamespace(host="127.0.0.1", port=1), client.nodes_manager
                known.slots_cache, known.nodes_cache = {slot: [gone] for slot in range(16384)}, {"gone": gone}
            assert decorated_async(lambda: "done", redis=client)() == "done"
            # Python loses a socket that the renewing thread connects while the proxy ends, such as for this release.
            assert not is_lost or eventually(lambda: proxy.commands.count("DELIFEQ") > 2)


def test_the_url_of_one_node_is_told_with_what_to_write(cluster: Cluster, names: list[str]) -> None:
    url = f"{cluster.nodes[0].server.url}?socket_timeout={LIMIT}"
    with pytest.raises(LockUnavailable, match=r"write redis=redis\.RedisCluster"):
        only_one(lambda: "done", key=names[1], redis=url)()


@both
def test_nodes_of_which_each_says_that_the_other_has_a_slot(
    cluster: Cluster, names: list[str], prefix: str, decorate: Decorate
) -> None:
    """They are asked some times only, and the user, who has given a cluster, is not told to give one."""
    one, other, _ = cluster.nodes
    slot = key_slot(f"{prefix}{names[0]}".encode())
    try:
        for node, named in ((one, other), (other, one)):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", named.id)
        with pytest.raises(LockUnavailable, match=r"of the cluster: [^(]*$"):
            decorate(lambda: "done", key=names[0])()
    finally:
        for node in cluster.nodes:
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", one.id)


LOOKS_FOR_SLOTS = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
import redis
from only_one import only_one

client = redis.RedisCluster("127.0.0.1", int(sys.argv[1]))
work = only_one(lambda: "done", key="forks", redis=client)
assert work() == "done"
for lock in (getattr(client.nodes_manager, name, None) for name in ("_initialization_lock", "_lock")):
    if lock is not None:  # until redis-py 7 there is but one
        ThreadPoolExecutor(1).submit(lock.acquire).result()

def is_well():
    return work() == "done"
"""


def test_a_child_that_is_forked_while_another_thread_looks_for_the_slots(cluster: Cluster) -> None:
    command = [sys.executable, "-W", "ignore", "-c", LOOKS_FOR_SLOTS + FORK, str(cluster.nodes[0].server.port)]
    assert subprocess.run(command, check=False).returncode == 7


async def echo(word: str) -> str:
    return word


# Nodes that do not answer


@both
@pytest.mark.usefixtures("prefix")
def test_a_cluster_that_is_down_when_its_client_is_made(redis_url: str, decorate: Decorate) -> None:
    """Each call makes a client until there is one, which connects at once."""
    kinds = iter([redis_py.RedisCluster, redis_py.RedisCluster, redis_py.Redis])

    def client() -> Any:
        kind: Any = next(kinds)
        return kind.from_url(redis_url if kind is redis_py.Redis else CLOSED)

    work = decorate(lambda: "done", redis=client, when_down=lambda _: "down")
    assert [work() for _ in range(4)] == ["down", "down", "done", "done"]


@pytest.mark.parametrize(
    ("fault", "mend"),
    [(RedisServer.pause, RedisServer.resume), (RedisServer.kill, RedisServer.start)],
    ids=["frozen", "killed"],
)
def test_a_lost_master_costs_no_lease_on_the_others(
    cluster: Cluster, names: list[str], prefix: str, fault: Callable[..., None], mend: Callable[..., None]
) -> None:
    first, second, lost = cluster.nodes
    with (
        Running(names[0], lease=60) as thread,
        RunningAsync(names[1], lease=60) as loop,
        RunningAsync(names[2], lease=60) as waits,
    ):
        runs = [thread, loop, waits]
        before = [run.lock.expires_at for run in runs]
        fault(lost.server)
        try:
            assert fails_to_renew(waits.lock)
            renew_now(*(run.lock for run in runs))
            assert eventually(lambda: thread.lock.expires_at > before[0] and loop.lock.expires_at > before[1])
            assert is_renewed(first.call, thread.lock)
            assert is_renewed(second.call, loop.lock)
            assert not any(run.told for run in runs)
        finally:
            mend(lost.server)
        # It is asked again as soon as it is back, and may know nothing.
        assert eventually(cluster.is_well)
        if fault is RedisServer.pause:
            # By its own turn, too, which may be under way: then the first look finds the time that the test has set.
            assert eventually(lambda: is_renewed(lost.call, waits.lock))
        else:
            renew_now(waits.lock)
            assert eventually(lambda: waits.told)
            with Running(names[2], lease=60) as again:
                assert is_renewed(lost.call, again.lock)
    assert [run.told for run in runs] == [[], [], ["deleted"] * (fault is RedisServer.kill)]
    assert not any(node.client.exists(f"{prefix}{name}") for node, name in zip(cluster.nodes, names, strict=True))


@pytest.mark.usefixtures("prefix")
def test_connections_of_an_event_loop_that_all_nodes_have_closed_cost_nothing(cluster: Cluster) -> None:
    """Until redis-py 7.1, a client whose commands have failed at all nodes at once knows none that it could ask."""
    words = [f"word {number}" for number in range(30)]
    call = only_one(echo, key="{word}")

    async def main() -> None:
        assert await asyncio.gather(*map(call, words)) == words
        for node in cluster.nodes:
            node.client.client_kill_filter(_type="normal", skipme=True)
        for _ in range(2):
            assert await asyncio.gather(*map(call, words)) == words

    asyncio.run(main())


def test_a_call_whose_first_reply_is_lost_runs(
    cluster: Cluster, names: list[str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command is sent again, as an event loop's is."""
    send, to_lose = nodes._ClusterNode.send_here, ["SET"]

    def lose(node: Any, commands: Any, pause: float | None = None) -> list[Any]:
        replies = send(node, commands, pause)
        if commands[-1][0] not in to_lose:
            return replies
        to_lose.clear()
        return [redis_py.ConnectionError("lost")]

    monkeypatch.setattr(nodes._ClusterNode, "send_here", lose)
    assert only_one(lambda: "done", key=names[0])() == "done"
    assert not to_lose
    assert not cluster.nodes[0].client.exists(f"{prefix}{names[0]}")


def test_an_event_loop_waits_for_a_node_that_was_restarted(
    cluster: Cluster, names: list[str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses all commands for two seconds, as redis-py's clients know, too; so does one that has lost the slot."""
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    node, slot = cluster.nodes[0], key_slot(f"{prefix}{names[0]}".encode())
    monkeypatch.setattr(asyncio, "sleep", pause)
    node.client.execute_command("CLUSTER DELSLOTS", slot)
    try:
        with pytest.raises(LockUnavailable, match="not served"):
            decorated_async(lambda: "done", key=names[0])()
    finally:
        node.client.execute_command("CLUSTER ADDSLOTS", slot)
    assert 2 < sum(pauses) < 3
    assert decorated_async(lambda: "done", key=names[0])() == "done"


@both
def test_a_node_that_has_left_the_cluster_and_still_answers(
    cluster: Cluster, names: list[str], decorate: Decorate
) -> None:
    """It knows of no other node that could have its slots, and refuses all commands."""
    call = decorate(lambda: "done", key=names[0])
    slot = cluster.client.keyslot(key_of(call))
    with cluster.node_without_slots() as leaves:
        assert eventually(lambda: leaves.call("CLUSTER INFO")["cluster_state"] == "ok")
        for owner in (leaves, cluster.nodes[0]):
            assert call() == "done"
            for node in (owner, *cluster.nodes):
                node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", owner.id)
        leaves.client.execute_command("CLUSTER RESET")
        assert call() == "done"


@both
def test_a_node_that_is_down_while_what_a_signal_has_raised_is_handled(
    cluster: Cluster, names: list[str], decorate: Decorate
) -> None:
    server = cluster.nodes[0].server
    server.kill()
    try:
        with pytest.raises(LockUnavailable, match="connecting to"):
            while_handling(Interruption, decorate(lambda: "done", key=names[0]))
    finally:
        server.start()
        assert eventually(cluster.is_well)


# What the thread that renews knows of the slots


class Said:
    """What nodes say that none can be brought to say, or not in time, in the place of what they do; by a still clock.

    Attributes:
        theirs: the nodes as the thread that renews knows them.
        replies: by port, what each node answers to each command.
        asked: who was asked for what.
    """

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock(monkeypatch, nodes, slots)
        self.theirs = nodes.ClusterNodes(slots.Slots(cluster.client), {})
        self.replies: dict[int, Callable[[str], Any]] = {}
        self.asked: list[tuple[int, str]] = []
        self.ports = [node.server.port for node in cluster.nodes]
        self.names = [self.theirs.at(("127.0.0.1", port)) for port in self.ports]

        def send_here(node: nodes.Node, commands: Any, pause: float | None = None) -> list[Any]:
            port = node.client.connection_pool.connection_kwargs["port"]
            self.asked += [(port, command[0]) for command in commands]
            replies = [self.replies[port](command[0]) for command in commands]
            if any(isinstance(reply, redis_py.ConnectionError) for reply in replies):
                node.fail(pause)
            return replies

        monkeypatch.setattr(nodes._ClusterNode, "send_here", send_here)

    def send(self, number: int, *commands: str) -> list[Any]:
        """What comes of commands that are sent to a node, and `asked` anew."""
        self.asked.clear()
        node = self.names[number]
        return node.send([(command,) for command in commands], 2.0)


@pytest.fixture
def said(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Said:
    return Said(cluster, monkeypatch)


def test_where_a_command_goes_whose_slot_has_moved_or_moves(said: Said) -> None:
    """By MOVED to the right node, when it is due again; by ASK at once, unless the node cannot be reached."""
    one, other, _ = said.ports
    said.replies[one] = lambda name: AskError("5 away:7") if name == "ASKED" else MovedError(f"5 127.0.0.1:{other}")
    said.replies[other] = lambda _: MovedError(f"5 :{one}")  # on the same host
    for number, asked, owner in ((0, one, other), (1, other, one)):
        (reply,) = said.send(number, "GET")
        assert isinstance(reply, MovedError)
        assert said.asked == [(asked, "GET")]
        assert said.theirs.slots.owners[5] == ("127.0.0.1", owner)
    said.theirs.at(("away", 7)).fail(2.0)
    (reply,) = said.send(0, "ASKED")
    assert type(reply) is AskError
    said.replies[7] = lambda name: "done" if name == "ASKED" else "OK"
    said.clock.moment += 2
    assert said.send(0, "ASKED") == ["done"]
    assert said.asked == [(one, "ASKED"), (7, "ASKING"), (7, "ASKED")]
    assert said.theirs.slots.owners[5] == ("127.0.0.1", one)


@pytest.mark.parametrize(
    "error",
    [redis_py.ConnectionError(), redis_py.ReadOnlyError(), ClusterDownError("")],
    ids=lambda error: type(error).__name__,
)
def test_a_node_that_may_have_been_replaced(said: Said, error: Exception) -> None:
    """The others that can be reached are asked, until one says which node has which slot."""
    one, other, third = said.ports
    of_the_key = redis_py.ResponseError("WRONGTYPE")
    said.replies[one] = {"GET": 1, "HGET": of_the_key, "SET": error, "CLUSTER": []}.__getitem__
    said.replies[other] = lambda _: redis_py.ConnectionError()
    said.replies[third] = lambda _: [[3, 5, ["", 7, "id"]], [9, 9, ["127.0.0.1", other, "id"]]]
    assert said.send(0, "GET", "HGET") == [1, of_the_key]
    assert said.asked == [(one, "GET"), (one, "HGET")]
    owners, rests = dict(said.theirs.slots.owners), MOMENT + 1
    for third_rests, asked in [(rests, [other]), (0, [other, third])]:
        assert said.theirs.slots.owners == owners
        said.names[1].backs_off_until, said.names[2].backs_off_until = 0, third_rests
        assert said.send(0, "GET", "SET") == [1, error]
        assert [port for port, name in said.asked if name == "CLUSTER" and port != one] == asked
    learnt = {**dict.fromkeys([3, 4, 5], ("127.0.0.1", 7)), 9: ("127.0.0.1", other)}
    assert said.theirs.slots.owners == {**owners, **learnt}
    said.replies[7] = lambda _: []  # as of a node that has left the cluster
    said.send(0, "SET")
    assert [port for port, name in said.asked if name == "CLUSTER"] == [7, third]


def test_a_slot_that_nobody_is_known_to_have(said: Said) -> None:
    """Any node is asked, and will know."""
    assert len({*map(id, said.theirs.slots.owners.values())}) == 3  # not a megabyte of tuples
    said.theirs.slots.owners.clear()
    assert said.theirs.node_of("k") in said.names


def test_a_cluster_of_one(said: Said) -> None:
    """There is nobody else to be asked, until the user's client has learnt of others."""
    manager, address = said.theirs.slots._manager, ("127.0.0.1", said.ports[0])
    said.theirs._nodes = {address: said.names[0]}
    said.theirs.slots.owners = dict.fromkeys(range(16384), address)
    said.replies.update(dict.fromkeys(said.ports, lambda _: redis_py.ConnectionError()))
    for known, asked in (({}, ["GET"]), (manager.nodes_cache, ["GET", *["CLUSTER"] * 2])):
        manager.nodes_cache = known
        said.send(0, "GET")
        assert [command for _, command in said.asked] == asked


# Slots that move


def moved(node: Node) -> int:
    """How often a node has said MOVED."""
    count: int = node.client.info("errorstats").get("errorstat_MOVED", {"count": 0})["count"]
    return count


def test_a_slot_that_moves_during_a_run(cluster: Cluster, names: list[str], prefix: str, kind: type[Running]) -> None:
    """By ASK while it moves, and then by MOVED: renewals, more time, fencing tokens, other callers and the release.

    Before that, the key is taken over from a dead holder.
    """
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    fence, slot = f"{{{key}}}:fence", cluster.client.keyslot(key)
    with Holder(source.server.url, prefix, key=name, timeout=600) as holder:
        holder.kill()
    assert source.client.get(key) == holder.token
    with kind(name, lease=60, timeout=600) as run:
        first = run.lock.fence
        assert first == int(source.client.get(fence))
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        for each in (key, fence):
            source.client.execute_command("MIGRATE", "127.0.0.1", target.server.port, each, 0, 2000)
        assert target.call("GET", key) == run.lock.token
    assert (run.told, target.call("EXISTS", key)) == ([], 0)
    with kind(name, lease=60, timeout=600, at_least=600) as run:
        assert target.call("GET", key) == run.lock.token
        assert is_renewed(target.call, run.lock)
        run.lock.extend(30)
        assert run.lock.fence > first
        assert only_one(lambda: "other", key=name)() is None
        assert run.lock.is_held
        for node in (target, source, *cluster.nodes):
            node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)
        assert is_renewed(target.client.execute_command, run.lock)
        # It has learnt where the slot is, and does not ask the old node first.
        sent_on = moved(source)
        assert is_renewed(target.client.execute_command, run.lock)
        assert moved(source) == sent_on > 0
    assert run.told == []
    assert b'"kept"' in target.client.get(key)
    assert 60_000 < target.client.pttl(key) <= 600_000
    target.client.delete(key)
    assert only_one(lambda: "next", key=name)() == "next"


def test_a_fencing_token_waits_until_a_slot_has_moved_that_has_one_of_two_keys(
    cluster: Cluster, names: list[str], prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, target, _), (name, *_) = cluster.nodes, names
    slot, pauses = cluster.client.keyslot(f"{prefix}{name}"), []

    def settle(seconds: float) -> None:
        pauses.append(seconds)
        if seconds:
            for node in (source, target):
                node.client.execute_command("CLUSTER SETSLOT", slot, "STABLE")

    monkeypatch.setattr(nodes, "time", SimpleNamespace(sleep=settle))
    with Running(name, lease=60) as run:
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        assert run.lock.fence > 0
    assert any(pauses)


@both
def test_a_slot_that_moves_to_a_node_that_has_none(cluster: Cluster, names: list[str], decorate: Decorate) -> None:
    """As where a node is added. Such a node is in no table of slots, and ASK is the first that a client hears of it."""
    source, (name, *_) = cluster.nodes[0], names
    with cluster.node_without_slots() as target:
        assert eventually(lambda: target.call("CLUSTER INFO")["cluster_state"] == "ok")
        call = decorate(lambda: target.call("DBSIZE"), key=name)
        slot = cluster.client.keyslot(key_of(call))
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        assert [call(), call()] == [1, 1]
        only_one(lambda: None, key=name)()
        opened = target.call("INFO", "stats")["total_connections_received"]
        only_one(lambda: None, key=name)()
        assert target.call("INFO", "stats")["total_connections_received"] == opened
        source.client.execute_command("CLUSTER SETSLOT", slot, "STABLE")


def test_calls_of_an_event_loop_at_once_cost_no_connection(cluster: Cluster, prefix: str) -> None:
    """redis-py may send the first of them to any node, and close all connections when five have answered MOVED."""
    source, target, bystander = cluster.nodes
    call = only_one(echo, key="{word}")
    of_slot = {key_slot(f"{prefix}{name}".encode()): name for name in map("k{}".format, range(100))}
    table = cluster.client.nodes_manager.slots_cache
    on_source = [slot for slot in of_slot if table[slot][0].port == source.server.port]

    async def main() -> None:
        before = sum(map(moved, cluster.nodes))
        first = [f"first {number}" for number in range(50)]
        assert await asyncio.gather(*map(call, first)) == first
        assert sum(map(moved, cluster.nodes)) == before
        opened = {each["id"] for each in bystander.client.client_list()}
        for number, slot in enumerate(on_source[:6], start=1):
            for node in (target, *cluster.nodes):
                node.client.execute_command("CLUSTER SETSLOT", slot, "NODE", target.id)
            assert await call(of_slot[slot]) == of_slot[slot]
            assert sum(map(moved, cluster.nodes)) == before + number
        assert opened <= {each["id"] for each in bystander.client.client_list()}

    asyncio.run(main())


def test_all_nodes_are_looked_at(cluster: Cluster, names: list[str], prefix: str) -> None:
    keys = {f"{prefix}{name}" for name in names}
    for key in keys:
        cluster.client.set(key, "x", px=60_000)

    assert {each.key for each in held()} == keys
    assert all(release_key(key, "x") for key in keys)
    assert not list(held())


def test_a_node_that_was_added_is_looked_at(prefix: str) -> None:
    """Also by a process that has looked before, and has sent nothing since for which a node would say MOVED."""
    with ExitStack() as stack:
        cluster = Cluster(stack)  # of the test's own
        with cluster.connected():
            server, key = find_server(cluster.client), f"{prefix}k"
            assert (list(held()), len(server.nodes.all())) == ([], 3)
            added = cluster.joins()
            for node in (added, *cluster.nodes):
                node.client.execute_command("CLUSTER SETSLOT", key_slot(key.encode()), "NODE", added.id)
            assert eventually(lambda: added.call("CLUSTER INFO")["cluster_state"] == "ok")
            added.client.set(key, "x", px=60_000)
            assert [each.key for each in held()] == [key]
            assert len(server.nodes.all()) == 4


@both
def test_a_call_knows_that_no_node_can_be_reached(
    cluster: Cluster, names: list[str], monkeypatch: pytest.MonkeyPatch, decorate: Decorate
) -> None:
    """All nodes are asked once where the slots are, that which has failed last; and nothing is sent again."""
    made: Any = slots.Trip
    sent, thread = [], threading.get_ident()

    def noted(address: Any, command: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:  # not that of the renewing thread
            sent.append((command[0], address[1]))
        return made(address, command, *args, **options)

    ports = [node.server.port for node in cluster.nodes]
    with redis_py.RedisCluster("127.0.0.1", ports[0], socket_timeout=0.3, socket_connect_timeout=0.3) as client:
        call = decorate(lambda: "done", key=names[0], redis=client, when_down=lambda _: "down")
        monkeypatch.setattr(slots, "Trip", noted)
        for node in cluster.nodes:
            node.server.pause()
        try:
            assert call() == "down"
        finally:
            for node in cluster.nodes:
                node.server.resume()
    (command, *looks) = sent
    assert command == ("SET", ports[0])
    assert sorted(looks) == sorted(("CLUSTER", port) for port in ports)
    assert looks[-1][1] == ports[0]


def test_calls_of_an_event_loop_know_together_that_no_node_can_be_reached(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look takes as long as the time-outs of all nodes together: each would look for itself, one after the other."""
    sent, kind = [], asyncio_connections.KeptConnections
    send = kind.send_raw

    async def noted(self: Any, command: Any, **options: Any) -> Any:
        sent.append(command[0])
        return await send(self, command, **options)

    monkeypatch.setattr(kind, "send_raw", noted)
    port = cluster.nodes[0].server.port
    with redis_py.RedisCluster("127.0.0.1", port, socket_timeout=0.3, socket_connect_timeout=0.3) as client:
        call = only_one(echo, key="{word}", redis=client, when_down=lambda _: "down")

        async def main() -> None:
            assert await call("up") == "up"
            for node in cluster.nodes:
                node.server.pause()
            try:
                sent.clear()
                assert await asyncio.gather(*(call(str(number)) for number in range(40))) == ["down"] * 40
                assert sent.count("CLUSTER") <= 2 * len(cluster.nodes)  # some may be sent while the others look
            finally:
                for node in cluster.nodes:
                    node.server.resume()

        asyncio.run(main())


# Replicas


def test_a_replica_is_not_asked_until_it_takes_over(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lag, so keys are read from masters only, whatever the user's client does.

    What the master had passed on is renewed at the new one, though nobody that is alive ever said MOVED. An event loop
    that knew the old one finds the new one, too, and asks past a node that has left the cluster and knows no slots.
    """
    addresses = slots.Slots.addresses
    with ExitStack() as stack, closing(asyncio.new_event_loop()) as loop:
        left = "127.0.0.1", stack.enter_context(redis_server(*OPTIONS)).port
        monkeypatch.setattr(slots.Slots, "addresses", lambda self: [left, *addresses(self)])
        cluster = Cluster(stack)  # of the test's own
        stack.enter_context(cluster.connected())
        master = cluster.nodes[0]
        replica, name = cluster.replica_of(master), cluster.name_on(master, prefix)
        key, function = f"{prefix}{name}", only_one(lambda: None, key=name)
        strategies = vars(redis_py.cluster).get("LoadBalancingStrategy", ())  # from redis-py 5.3 on
        options: Any = [{"read_from_replicas": True}, *({"load_balancing_strategy": each} for each in strategies)]
        connect: Any = partial(redis_py.RedisCluster, "127.0.0.1", master.server.port, decode_responses=True)
        with Running(name, lease=600) as run:
            for option in options:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the first option, in favour of the second
                    client = connect(**option)
                with client, configure(redis=client):
                    for _ in range(4):  # as the client takes turns
                        assert [each.key for each in held()] == [key]
                        assert holder_of(function) is not None
                        assert find_server(client).client.send_raw(("PTTL", key)) > 0
            assert not {"cmdstat_get", "cmdstat_pttl"} & {*replica.client.info("commandstats")}
            in_loop = only_one(echo, key=lambda _: name, when_down=lambda _: "down")
            assert loop.run_until_complete(in_loop("beside the run")) is None
            master.client.wait(1, round(LIMIT * 1000))
            assert replica.client.info("keyspace")  # only the slot's master answers for the key itself
            master.server.kill()
            replica.client.execute_command("CLUSTER FAILOVER TAKEOVER")
            assert eventually(lambda: replica.client.info("replication")["role"] == "master")
            assert is_renewed(replica.client.execute_command, run.lock)
            assert replica.client.get(key) == run.lock.token
            assert run.lock.fence > 0
        assert run.told == []
        assert eventually(lambda: not replica.client.exists(key))
        assert eventually(lambda: loop.run_until_complete(in_loop("next")) == "next")
        clients, server = vars(loop)[f"only_one_clients_{os.getpid()}"], find_server(cluster.client)
        assert not clients[server][0].client._nodes["127.0.0.1", master.server.port]._all
        loop.run_until_complete(loop.shutdown_asyncgens())
        assert only_one(lambda: "next", key=name)() == "next"
