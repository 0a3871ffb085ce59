"""The model of the server replies and stores what real servers do."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st
from redis._parsers import helpers

from only_one.call import owed_key
from only_one.celery import coalescing, redelivery
from only_one.lock import commands as lock_commands
from rigs.servers import redis_server
from rigs.waiting import eventually
from tests.clients import clients
from tests.faults import test_cluster as real_clusters
from tests.lock.test_redis_lock import OLD

from .deployments import Cluster, Sentinels
from .server import Refusal, Status, Store

KEYS = [b"{k}", b"{k}:beside", b"{k}:other"]
VALUES = [b'{"state":"running"}', b'{"state":"queued"}', b"queued"]
keys, values = st.sampled_from(KEYS), st.sampled_from(VALUES)
lives = st.sampled_from([b"60000", b"90000"])
lasts = st.sampled_from([b"-1", b"0", b"60000"])
conditions = st.sampled_from([b"", b"may be missing", b"may be withdrawn"])
numbers = st.sampled_from([b"0", b"1", b"2"])


def command(*parts: bytes | st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return st.tuples(*(st.just(each) if isinstance(each, bytes) else each for each in parts)).map(list)


def script(script: Any, *args: bytes | st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return command(b"EVAL", script.text.encode(), b"%d" % len(KEYS), *KEYS, *args)


scripts = [  # those that do not reply the time
    script(lock_commands.RENEW, values, lives),
    script(lock_commands._RELEASE, values, lasts),
    script(lock_commands._REPLACE, values, values, lives, conditions, lasts),
    script(redelivery._READ, lasts),
    script(redelivery.STORED),
    script(redelivery.REQUEUED, numbers, lives),
    script(owed_key._WITHDRAW, values, lives, numbers),
    script(coalescing._NOTE_PUBLISHED, numbers, lives, lives, lives),
]
plain = [
    command(b"SET", keys, values, b"NX", b"GET", b"PX", lives),
    command(b"SET", keys, values, b"NX", b"PX", lives),
    command(b"GET", keys),
    command(b"DEL", keys),
    command(b"DELIFEQ", keys, values),
    command(b"DELEX", keys, b"IFEQ", values),
    command(b"HSET", keys, values, numbers),
    command(b"PEXPIRE", keys, lives),
    command(b"PEXPIRE", keys, b"-1"),  # it expires at once
    command(b"PTTL", keys),
    command(b"SCAN", b"0", b"MATCH", rb"\{\k\}*", b"COUNT", b"1000"),
]
sequences = st.lists(st.one_of(*plain, *scripts), max_size=12)


@pytest.fixture(scope="module", params=[None, OLD] if OLD else [None], ids=lambda old: "old" if old else "new")
def real(request: pytest.FixtureRequest) -> Iterator[Any]:
    with redis_server(binary=request.param) as server, redis.Redis.from_url(server.url) as client:
        yield client


def kind_of(client: Any) -> str:
    """Which server it is, as the model names it."""
    server = client.info("server")
    version = tuple(map(int, server["redis_version"].split(".")[:2]))
    known = {"valkey": "valkey_version" in server, "redis": version >= (8, 4), "redis7": version >= (7, 0)}
    return next((kind for kind, is_it in known.items() if is_it), "redis6")


def reply_of(client: Any, command: list[bytes]) -> Any:
    try:
        return client.execute_command(*command, NEVER_DECODE=True)
    except redis.ResponseError as error:
        return error


def comparable(reply: Any, name: bytes) -> Any:
    """A reply without what differs by time, by server or by client: only how an error begins."""
    if isinstance(reply, Exception):
        text = str(reply).removeprefix("WRONGTYPE ").removeprefix("ERR ")
        return "unknown" if "unknown command" in text else text[:20]
    if name == b"PTTL" and isinstance(reply, int) and reply > 0:
        return round(reply / 30_000)
    if name == b"SCAN":
        return sorted(reply[1])
    if isinstance(reply, list):  # the last field is the age, by the server's clock
        return [comparable(each, b"") for each in reply[:-1]]
    return "OK" if isinstance(reply, Status) or reply in (b"OK", True) else reply


@settings(max_examples=150, deadline=None)
@given(sequence=sequences)
def test_the_model_replies_and_stores_what_a_real_server_does(sequence: list[Any], real: Any) -> None:
    model = Store(time.monotonic, time.time, kind_of(real))
    real.delete(*KEYS)
    for command in [*sequence, *([b"GET", key] for key in KEYS), *([b"PTTL", key] for key in KEYS)]:
        expected, modelled = reply_of(real, command), model.execute(command)
        both = [comparable(reply, command[0]) for reply in (modelled, expected)]
        assert both[0] == both[1], (command[:2], modelled, expected)


def words(ask: Any) -> list[str]:
    """How nodes send commands of one key and of two on, of which the first key is there: a word, or "" if not."""
    keys = [b"{k}", b"{k}:other"]
    asked = itertools.product(("source", "target"), (False, True), (keys[:1], keys[1:], keys))
    return [ask(at, [b"EVAL", b"return 1", b"%d" % len(each), *each], is_asking=asks) for at, asks, each in asked]


def word_of(client: Any, command: list[bytes], *, is_asking: bool) -> str:
    """How a real node sends a command on."""
    trip = client.pipeline(transaction=False)
    for each in [[b"ASKING"], command] if is_asking else [command]:
        trip.execute_command(*each)
    reply = trip.execute(raise_on_error=False)[-1]
    if type(reply) is redis.ResponseError:  # until redis-py 5
        return str(reply).partition(" ")[0]
    return type(reply).__name__.removesuffix("Error").upper() if isinstance(reply, Exception) else ""


def test_the_model_of_a_cluster_sends_commands_on_as_a_real_one_does() -> None:
    store = Store(time.monotonic, time.time)
    history = SimpleNamespace(store=store, hosts=["source", "target"], now=0.0, note=print, after=print)
    history.choose = lambda _label, choices: choices[0]
    model, seen = Cluster(history), set()
    with ExitStack() as stack:
        real = real_clusters.Cluster(stack)
        stack.enter_context(real.connected())
        port, slot = real.client.get_node_from_key("{k}").port, real.client.keyslot("{k}")
        source, target, *_ = sorted(real.nodes, key=lambda each: each.server.port != port)
        nodes = {"source": source, "target": target}

        def set_slot(node: Any, *to: object) -> None:
            node.client.execute_command("CLUSTER SETSLOT", slot, *to)

        def compare() -> None:
            modelled = words(lambda name, *command, **how: str(model.answer(name, *command, **how) or ""))
            modelled = [each.partition(" ")[0] for each in modelled]
            assert modelled == words(lambda name, *command, **how: word_of(nodes[name].client, *command, **how))
            seen.update(modelled)

        store.execute([b"SET", b"{k}", b"v", b"PX", b"60000"])
        source.client.set("{k}", "v")
        compare()
        model.move(1)
        set_slot(target, "IMPORTING", source.id)
        set_slot(source, "MIGRATING", target.id)
        compare()
        model._move_keys(1)
        source.client.execute_command("MIGRATE", "127.0.0.1", target.server.port, "{k}", 0, 2000)
        compare()
        model.give(1)
        for each in (target, source, *real.nodes):
            set_slot(each, "NODE", target.id)
        compare()
    assert seen == {"", "ASK", "MOVED", "TRYAGAIN"}


def test_the_model_of_sentinels_answers_as_real_ones_and_a_replica_do() -> None:
    history = SimpleNamespace(now=0.0, note=print, choose=lambda _label, choices: choices[0])
    model, token = Sentinels(history), b"token"
    writes: list[Any] = [(b"SET", b"k", token, b"NX", *more, b"PX", b"60000") for more in ((), (b"GET",))]
    writes += [lock_commands.RENEW.command((b"k",), token, 60_000), lock_commands._RELEASE.command((b"k",), token, -1)]
    reads: list[Any] = [(b"GET", b"k"), (b"PTTL", b"k"), (b"SCAN", b"0")]
    with ExitStack() as stack:
        those = stack.enter_context(clients("Sentinel"))
        sentinel = stack.enter_context(those.connect()).connection_pool.sentinel_manager.sentinels[0]
        replica = stack.enter_context(redis_server("--replicaof", f"127.0.0.1 {those.server.port}"))
        client: Any = stack.enter_context(redis.Redis.from_url(replica.url))
        those.witness.set("k", token)
        assert eventually(lambda: client.get("k") == token)
        for each in (*writes, *reads):
            command = [part if isinstance(part, bytes) else str(part).encode() for part in each]
            modelled, real = model.answer("other", command, is_asking=False), reply_of(client, command)
            assert isinstance(modelled, Refusal) is isinstance(real, redis.ReadOnlyError) is (each in writes), command
        (told,) = helpers.parse_sentinel_masters(  # type: ignore[no-untyped-call]
            model.answer("sentinel", [b"SENTINEL"], is_asking=False)
        ).values()
        (really_told,) = sentinel.sentinel_masters().values()
        where = {"name", "ip", "port", "num-other-sentinels"}
        assert told.keys() >= where
        assert {name: value for name, value in told.items() if name not in where}.items() <= really_told.items()
