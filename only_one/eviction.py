"""Servers that may evict the keys of runs that are under way."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

_asked: set[str] = set()


def may_evict(client: Any) -> str | None:
    """Find out whether a server deletes keys to make room, with one round trip, and once in the life of the process.

    Keys that expire are what the `volatile-` policies evict, too.

    Args:
        client: a client of redis-py, of one node.

    Returns:
        What there is to be warned of, else None; also where the server does not tell.

    Raises:
        RedisError: if the server cannot be asked.
    """
    server = _name(client.connection_pool)
    if server in _asked:
        return None
    try:
        found = client.info("memory")
    except ResponseError:  # this user may not
        found = {}
    _asked.add(server)
    policy = str(found.get("maxmemory_policy"))
    if not policy.startswith(("allkeys-", "volatile-")) or not found.get("maxmemory"):
        return None
    return (
        f"{server} evicts keys when its memory is full (maxmemory-policy {policy}), and a run may lose its key so: "
        "write maxmemory-policy noeviction in its configuration, or give redis= a server that has it"
    )


def _name(pool: Any) -> str:
    """The server, without credentials."""
    options = pool.connection_kwargs
    address = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    return str(getattr(pool, "service_name", address))
