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
from redis.exceptions import RedisError

from only_one import LockUnavailable, configure, only_one
from only_one.connections import slots
from only_one.connections.server import Server, find_server
from only_one.inspection import held, holder_of, key_of, release_key
from rigs.proxy import Proxy
from rigs.servers import RedisServer, redis_server
from rigs.waiting import LIMIT, eventually
from tests import renewal
from tests.connections.test_kept_connections import Behind
from tests.decorated import Decorate, both, call_both, decorated, decorated_async
from tests.faults.programs import Holder, Running, RunningAsync
from tests.faults.test_fork import FORK
from tests.renewal import fails_to_renew, renew_now

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
            # Python loses a socket that the renewing thread connects while the proxy ends, as for this release.
            assert not is_lost or eventually(lambda: proxy.commands[-1] == proxy.commands[-2])


def test_the_url_of_one_node_is_told_with_what_to_write(cluster: Cluster, names: list[str]) -> None:
    url = f"{cluster.nodes[0].server.url}?socket_timeout={LIMIT}"
    with pytest.raises(LockUnavailable, match=r"write redis=redis\.RedisCluster"):
        only_one(lambda: "done", key=names[1], redis=url)()


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
    call, sync = only_one(echo, key="{word}"), decorated(lambda word: word, "{word}")

    async def main() -> None:
        for is_closed in (True, False, False):
            assert await asyncio.gather(*map(call, words)) == words
            assert [sync(word) for word in words] == words
            for node in cluster.nodes if is_closed else ():
                node.client.client_kill_filter(_type="normal", skipme=True)

    asyncio.run(main())


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


def test_a_command_at_a_node_that_gets_its_first_slot_is_left_alone_when_another_node_is_asked_first(
    cluster: Cluster, prefix: str
) -> None:
    source, *others = cluster.nodes
    key, *keys = [f"{prefix}{cluster.name_on(node, prefix)}" for node in cluster.nodes]
    slot, server = key_slot(key.encode()), Server(cluster.client)

    async def main() -> None:
        client = await server.async_client()
        under_way = asyncio.create_task(client.send_raw(("BLPOP", key, 0)))
        assert await asyncio.to_thread(eventually, lambda: target.client.info("clients")["blocked_clients"])
        assert [await client.send_raw(("GET", each)) for each in keys] == [None] * len(others)
        target.call("RPUSH", key, "done")
        assert await under_way == [key.encode(), b"done"]

    with cluster.node_without_slots() as target:
        assert eventually(lambda: target.call("CLUSTER INFO")["cluster_state"] == "ok")
        target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
        asyncio.run(main())
        source.client.execute_command("CLUSTER SETSLOT", slot, "STABLE")


@pytest.mark.usefixtures("prefix")
def test_a_cluster_s_client_behind_an_object_that_forwards_to_it(cluster: Cluster) -> None:
    """As Flask-Redis does, with any class of redis-py."""
    given = Behind(cluster.client)
    assert call_both(lambda: [each.process for each in held(redis=given)], redis=given) == [["alive"]] * 2


def test_all_nodes_are_looked_at(prefix: str) -> None:
    """Also one that was added, by a process to which no node has said MOVED since."""
    with ExitStack() as stack:
        cluster = Cluster(stack)  # of the test's own
        with cluster.connected():
            names = [cluster.name_on(node, prefix) for node in cluster.nodes]
            keys = {f"{prefix}{name}" for name in names}
            for key in keys:
                cluster.client.set(key, "x", px=60_000)
            assert {each.key for each in held()} == keys
            assert all(release_key(key, "x") for key in keys)
            added, key = cluster.joins(), f"{prefix}k"
            added.client.execute_command("CLUSTER BUMPEPOCH")  # or the slot's owner may claim it again meanwhile
            for node in (added, *cluster.nodes):
                node.client.execute_command("CLUSTER SETSLOT", key_slot(key.encode()), "NODE", added.id)
            assert eventually(lambda: added.call("CLUSTER INFO")["cluster_state"] == "ok")
            added.client.set(key, "x", px=60_000)
            assert [each.key for each in held()] == [key]
            assert len(find_server(cluster.client).nodes.all()) == 4


def test_calls_know_together_that_no_node_can_be_reached(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look takes as long as the time-outs of all nodes together: each would look for itself, one after the other."""
    made: Any = slots.Trip
    asked, thread = [], threading.get_ident()

    def noted(address: Any, command: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread and command[0] == "CLUSTER":  # not in that of the renewing thread
            asked.append(address)
        return made(address, command, *args, **options)

    async def at_once(**options: Any) -> list[Any]:
        call: Any = decorated(echo, "{word}", when_down=lambda _: "down", **options)
        return await asyncio.gather(*(call(f"word {each}") for each in range(40)))

    port = cluster.nodes[0].server.port
    with redis_py.RedisCluster("127.0.0.1", port, socket_timeout=0.3, socket_connect_timeout=0.3) as client:
        monkeypatch.setattr(slots, "Trip", noted)
        for node in cluster.nodes:
            node.server.pause()
        try:
            results = asyncio.run(at_once(redis=client))
        finally:
            for node in cluster.nodes:
                node.server.resume()
    assert {*results} == {"down"}
    assert len(asked) <= 2 * len(cluster.nodes)  # some may be sent while the others look


# Replicas


def test_a_replica_is_not_asked_until_it_takes_over(prefix: str) -> None:
    """It may lag, so keys are read from masters only, whatever the user's client does.

    What the master had passed on is renewed at the new one, though nobody that is alive ever said MOVED. An event loop
    that knew the old one finds the new one, too.
    """
    with ExitStack() as stack, closing(asyncio.new_event_loop()) as loop:
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
