"""A real cluster of three masters: nodes that freeze and die, and slots that move, while runs hold keys in them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import redis as redis_py
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from only_one import LockUnavailable, configure, only_one, skip
from only_one.inspection import held, release_key
from only_one.testing import RedisServer, redis_server
from tests.faults.programs import SLACK, Holder, Running, RunningAsync
from tests.waiting import LIMIT, eventually

LEASE = 1.5
"""Seconds; a renewal may wait for one node that does not answer, and be late for other reasons besides."""

OPTIONS = (
    *("--cluster-enabled", "yes"),
    *("--cluster-node-timeout", "1000"),
    *("--cluster-require-full-coverage", "no"),
    *("--repl-diskless-sync-delay", "0"),
)

shared_by_threads = pytest.mark.skipif(
    tuple(map(int, redis_py.__version__.split(".")[:2])) < (7, 2),
    reason="before redis-py 7.2 a cluster's client that looks for slots closes connections under other threads",
)

both = pytest.mark.parametrize("kind", [Running, RunningAsync], ids=["sync", "async"])


class Node:
    """One master, asked directly: the witness of what stands in it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.client: Any = redis_py.Redis.from_url(server.url, socket_timeout=2, socket_connect_timeout=2)
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
    """

    def __init__(self, servers: list[RedisServer]) -> None:
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
        """A client as users have it, which waits for seconds."""
        options = {"socket_timeout": 2, **options}
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

    def name_on(self, node: Node, prefix: str) -> str:
        """A name whose key is kept by a node."""
        names = (f"k{number}" for number in itertools.count())
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


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster([stack.enter_context(redis_server(*OPTIONS)) for _ in range(3)])


@pytest.fixture
def cluster(three: Cluster, prefix: str) -> Iterator[Cluster]:
    """The cluster, which is well; what a test covers takes its keys there."""
    assert prefix
    assert eventually(three.is_well, 30)
    client = three.connect()
    with configure(redis=client):
        yield three
    client.close()


@pytest.fixture
def names(cluster: Cluster, prefix: str) -> list[str]:
    """A name for each node, whose key is kept there."""
    return [cluster.name_on(node, prefix) for node in cluster.nodes]


def stays(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition holds for some time."""
    return not eventually(lambda: not condition(), seconds)


def is_renewed(ask: Callable[..., Any], key: str) -> bool:
    """Whether the time that a key is to live is lengthened where it is now, as its node says."""
    before: list[int] = []

    def has_risen() -> bool:
        before.append(ask("PTTL", key))
        return min(before) > 0 and before[-1] > min(before) + 50

    return eventually(has_risen)


def freeze(server: RedisServer) -> Callable[[], None]:
    server.pause()
    return server.resume


def kill(server: RedisServer) -> Callable[[], None]:
    server.kill()
    return server.start


# Nodes that do not answer


@both
@pytest.mark.parametrize("fault", [freeze, kill], ids=["frozen", "killed"])
def test_a_lost_master_costs_no_lease_on_the_others(
    cluster: Cluster,
    names: list[str],
    prefix: str,
    kind: type[Running],
    fault: Callable[[RedisServer], Callable[[], None]],
) -> None:
    told: list[tuple[str, float]] = []

    def tell(lost: Any) -> None:
        told.append((lost.key, time.monotonic()))

    first, second, lost = cluster.nodes
    with ExitStack() as stack:
        runs = [stack.enter_context(kind(name, lease=LEASE, when_lost=tell)) for name in names]
        tokens = [run.lock.token for run in runs]

        def are_held() -> bool:
            stand = [node.client.get(f"{prefix}{name}") for node, name in zip((first, second), names, strict=False)]
            return all(run.lock.is_held for run in runs[:2]) and stand == tokens[:2]

        repair = fault(lost.server)
        begun = time.monotonic()
        try:
            assert stays(are_held, 2 * LEASE)
            assert not runs[2].lock.is_held
        finally:
            repair()
    assert [run.result for run in runs] == ["done"] * 3
    ((key, moment),) = told
    assert key == f"{prefix}{names[2]}"
    assert moment - begun < LEASE + SLACK
    assert [node.client.exists(f"{prefix}{name}") for node, name in zip((first, second), names, strict=False)] == [0, 0]
    # And it is renewed there again as soon as it is back.
    assert eventually(cluster.is_well, 30)
    with kind(names[2], lease=LEASE) as run:
        assert lost.client.get(f"{prefix}{names[2]}") == run.lock.token
        assert is_renewed(lost.client.execute_command, f"{prefix}{names[2]}")


@both
def test_a_master_that_is_frozen_for_less_than_the_lease(
    cluster: Cluster, names: list[str], prefix: str, kind: type[Running]
) -> None:
    told: list[object] = []
    lease = 6.0
    (node, *_), (name, *_) = cluster.nodes, names
    with kind(name, lease=lease, when_lost=told.append) as run:
        node.server.pause()
        try:
            assert eventually(lambda: run.lock.expires_in < lease * 0.55)  # a renewal is overdue
        finally:
            node.server.resume()
        assert eventually(lambda: run.lock.expires_in > lease * 0.7)
        assert node.client.get(f"{prefix}{name}") == run.lock.token
    assert run.result == "done"
    assert told == []


def test_a_frozen_master_does_not_delay_what_is_left_on_another(
    cluster: Cluster, names: list[str], prefix: str
) -> None:
    """Tokens of unknown fate are released on the one while the other does not answer."""
    back, frozen, healthy = cluster.nodes
    clients = [cluster.connect(retry=Retry(NoBackoff(), 0)) for _ in range(2)]  # redis-py 5's bears no two threads
    calls = [
        only_one(lambda: "done", key=name, lease=60, redis=client, when_down=skip)
        for name, client in zip(names, clients, strict=False)
    ]
    before = [
        node.client.info("commandstats")["cmdstat_set"]["calls"] if call() else 0
        for node, call in zip((back, frozen), calls, strict=True)
    ]
    assert all(before)
    # Else it would refuse all commands, as the majority of masters is out of its reach.
    healthy.client.config_set("cluster-node-timeout", 60_000)
    with Running(names[2], lease=LEASE) as run:
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
            assert eventually(lambda: back.client.info("commandstats")["cmdstat_set"]["calls"] > before[0])
            assert eventually(lambda: not back.client.exists(f"{prefix}{names[0]}"), 5)
            assert run.lock.is_held
            assert healthy.client.get(f"{prefix}{names[2]}") == run.lock.token
        finally:
            back.server.resume()
            frozen.server.resume()
    assert run.result == "done"
    assert eventually(lambda: not frozen.client.exists(f"{prefix}{names[1]}"))
    healthy.client.config_set("cluster-node-timeout", 1000)
    for client in clients:
        client.close()


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
    with kind(name, lease=LEASE, timeout=60, when_lost=told.append) as run:
        first = run.lock.fence
    with kind(name, lease=LEASE, timeout=60, when_lost=told.append) as run:
        cluster.begin_to_move(slot, source, target, key, f"{{{key}}}:fence")
        try:
            assert target.call("GET", key) == run.lock.token
            assert is_renewed(target.call, key)
            assert is_renewed(target.call, key)
            run.lock.extend(30)
            assert run.lock.fence > first
            assert only_one(lambda: "other", key=name)() is None
            assert run.lock.is_held
        finally:
            cluster.finish_moving(slot, source, target)
        assert is_renewed(target.client.execute_command, key)
        # It has learnt where the slot is, and does not ask the old node first.
        sent_on = moved(source)
        assert is_renewed(target.client.execute_command, key)
        assert is_renewed(target.client.execute_command, key)
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


@pytest.mark.parametrize("is_shared", [pytest.param(True, marks=shared_by_threads), False], ids=["one", "four"])
def test_runs_exclude_each_other_while_their_slot_moves(
    cluster: Cluster,
    names: list[str],
    prefix: str,
    redis_url: str,
    is_shared: bool,  # noqa: FBT001
) -> None:
    """Of one client or of four; seen by a counter in another server, which knows nothing of locks."""
    (source, target, _), (name, *_) = cluster.nodes, names
    key = f"{prefix}{name}"
    slot = key_slot(key.encode())
    seen: list[int] = []
    enough = threading.Event()
    clients = [cluster.connect() for _ in range(1 if is_shared else 4)]

    with redis_py.Redis.from_url(redis_url) as witness:

        def work() -> None:
            seen.append(witness.incr(f"{prefix}witness"))
            time.sleep(0.001)
            witness.decr(f"{prefix}witness")

        calls = [only_one(work, key=name, lease=LEASE, redis=client) for client in clients]

        def go_on(call: Callable[[], None]) -> None:
            while not enough.is_set():
                with suppress(LockUnavailable):
                    call()

        threads = [threading.Thread(target=go_on, args=(calls[number % len(calls)],)) for number in range(4)]
        for thread in threads:
            thread.start()
        counts = []
        try:
            for one, other in [(source, target), (target, source)] * 3:
                cluster.begin_to_move(slot, one, other, key)
                begun = len(seen)
                assert eventually(lambda begun=begun: len(seen) > begun + 20)  # type: ignore[misc]
                cluster.begin_to_move(slot, one, other, key)
                cluster.finish_moving(slot, one, other)
                begun = len(seen)
                assert eventually(lambda begun=begun: len(seen) > begun + 20)  # type: ignore[misc]
                counts.append(len(seen))
        finally:
            enough.set()
            for thread in threads:
                thread.join(LIMIT)
        witness.delete(f"{prefix}witness")
    for client in clients:
        client.close()
    print(f"{len(seen)} runs during 6 moves")
    assert set(seen) == {1}


# Replicas


def test_a_replica_that_takes_over_during_a_run(prefix: str) -> None:
    """What the master had passed on is renewed at the new one, though nobody that is alive ever said MOVED."""
    told: list[object] = []
    with ExitStack() as stack:
        cluster = Cluster([stack.enter_context(redis_server(*OPTIONS)) for _ in range(3)])
        assert eventually(cluster.is_well, 30)
        master = cluster.nodes[0]
        name = cluster.name_on(master, prefix)
        key = f"{prefix}{name}"
        replica = Node(stack.enter_context(redis_server(*OPTIONS)))
        replica.client.execute_command("CLUSTER MEET", "127.0.0.1", master.server.port)
        assert eventually(lambda: len(replica.client.execute_command("CLUSTER NODES")) == 4)
        replica.client.execute_command("CLUSTER REPLICATE", master.id)
        assert eventually(lambda: replica.client.info("replication").get("master_link_status") == "up")
        # Only now all nodes know of it, and so does the client.
        assert eventually(lambda: all(knows(node, replica) for node in cluster.nodes))
        client = stack.enter_context(cluster.connect())
        with configure(redis=client), Running(name, lease=8, when_lost=told.append) as run:
            assert master.client.wait(1, 2000) == 1
            master.server.kill()
            assert eventually(lambda: replica.client.info("replication")["role"] == "master")
            assert is_renewed(replica.client.execute_command, key)
            assert replica.client.get(key) == run.lock.token
            assert run.lock.fence > 0
        assert (run.result, told) == ("done", [])
        assert not replica.client.exists(key)
        with configure(redis=client):
            assert only_one(lambda: "next", key=name)() == "next"


def knows(node: Node, replica: Node) -> bool:
    """Whether a node says that a replica is there, to take over."""
    slots = node.client.execute_command("CLUSTER SLOTS")
    return replica.server.port in {port for _, _, *nodes in slots for _, port, *_ in nodes}


def test_all_nodes_are_looked_at(cluster: Cluster, names: list[str], prefix: str) -> None:
    client = cluster.connect()
    keys = {f"{prefix}{name}" for name in names}
    for key in keys:
        client.set(key, "x", px=60_000)

    assert {each.key for each in held()} == keys
    assert all(release_key(key, "x") for key in keys)
    assert not list(held())
    client.close()
