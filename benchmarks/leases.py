"""What it costs to hold many keys in one process, beside python-redis-lock, which renews each by a thread of its own.

    python -m benchmarks.leases [--leases N] [--peer-leases N] [--lease SECONDS] [--periods N]

Each is measured in a process of its own, on a server of its own.
The server counts the renewals, and how many of the keys are there is looked at several times per lease.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import redis

from only_one.connections.server import find_server
from only_one.lock.commands import acquire, drive, expiry_in, now
from only_one.lock.current_lock import Lease
from only_one.lock.holder import TokenFactory
from only_one.lock.renewal import hold
from only_one.testing import redis_server

PEER = "redis_lock"
AT_ONCE = 1000
LOOKS = 10
"""How often per lease it is looked at whether the keys are there."""


def hold_ours(url: str, keys: list[str], lease: float) -> list[Any]:
    """Take keys and hold them, as covered runs do."""
    server, identity = find_server(url), TokenFactory("benchmark")
    leases = []
    for key in keys:
        token, begun = identity.token(None), now()
        found = drive(server.client, acquire(server.features, key, token, expiry_in(lease)))
        if found is not None:
            raise ValueError(found)
        leases.append(Lease(server, key, token, begun, lease, inf))
        hold(leases[-1])
    return leases


def hold_theirs(url: str, keys: list[str], lease: float) -> list[Any]:
    """The same with python-redis-lock."""
    redis_lock: Any = importlib.import_module(PEER)
    # Each of its threads uses a connection, and one that gets none renews no more.
    client = redis.Redis.from_url(url, max_connections=2**31)
    locks = []
    for key in keys:
        lock = redis_lock.Lock(client, key.removeprefix("lock:"), expire=round(lease), auto_renewal=True)
        lock.acquire(blocking=False)
        locks.append(lock)
    return locks


def memory() -> float:
    """Bytes that this process has in memory: now, or where that cannot be read, at the most until now."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def renewals(client: Any) -> int:
    """How many scripts the server has run; a renewal is one, with both."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


def count(client: Any, keys: list[str]) -> int:
    """How many of the keys are there."""
    return sum(int(client.exists(*keys[start : start + AT_ONCE])) for start in range(0, len(keys), AT_ONCE))


def watch(url: str, keys: list[str], seconds: float, lease: float) -> int:
    """Look from another process, so that it costs this one nothing; returns how many were there at the least."""
    program = "import json, sys; from benchmarks.leases import look; look(*json.load(sys.stdin))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps([url, keys, seconds, lease]),
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout)


def look(url: str, keys: list[str], seconds: float, lease: float) -> None:
    """What the other process does."""
    until, least = time.monotonic() + seconds, len(keys)
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < until:
            least = min(least, count(client, keys))
            time.sleep(lease / LOOKS)
    print(least)


def measure(take_and_hold: Callable[[str, list[str], float], list[Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Hold keys for some leases, and say what that has cost."""
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        client.ping()
        warm = take_and_hold(server.url, ["lock:warm-up"], options.lease)
        before, threads = memory(), threading.active_count() - len(warm)
        keys = [f"lock:{number}" for number in range(options.count)]
        held = take_and_hold(server.url, keys, options.lease)
        taken = memory() - before
        time.sleep(options.lease)  # until all have been renewed for the first time
        seen, cpu = renewals(client), time.process_time()
        least = watch(server.url, keys, options.periods * options.lease, options.lease)
        cpu, seen = time.process_time() - cpu, renewals(client) - seen
        return {
            "leases": len(held),
            "threads": threading.active_count() - threads,
            "kept": least,
            "renewals": seen,
            "cpu": cpu,
            "memory": taken / len(held),
        }


def measured(name: str, number: int, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.leases", "--one", name, "--count", str(number)]
    times = ["--lease", str(options.lease), "--periods", str(options.periods)]
    with subprocess.Popen([*command, *times], stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
    if not line:
        return {}
    found: dict[str, Any] = json.loads(line)
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print one line of the table."""
    if not found:
        print(f"{name:20}  did not come to an end")
        return
    each = found["cpu"] / found["renewals"] * 1e6 if found["renewals"] else inf
    print(
        f"{name:20} {found['leases']:7,} {found['kept']:10,} {found['threads']:8,} {found['renewals']:9,}"
        f" {found['cpu']:8.2f} {each:11.0f} {found['memory'] / 1024:10.1f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=10_000, help="keys that only_one holds (10000)")
    parser.add_argument("--peer-leases", type=int, default=1_000, help="keys that both hold (1000)")
    parser.add_argument("--lease", type=float, default=6.0, help="seconds, whole ones for python-redis-lock (6)")
    parser.add_argument("--periods", type=float, default=5.0, help="for how many leases they are held (5)")
    parser.add_argument("--one", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(hold_ours if options.one == "ours" else hold_theirs, options)), flush=True)
        os._exit(0)  # thousands of threads are not waited for
    print(f"redis-py {redis.__version__}, leases of {options.lease:g} s, held for {options.periods:g} of them")
    print(f"{'':20}  leases  all kept*  threads  renewals  CPU s  µs/renewal  KiB/lease")
    show("only_one", measured("ours", options.leases, options))
    show("only_one", measured("ours", options.peer_leases, options))
    if importlib.util.find_spec(PEER):
        show("python-redis-lock", measured("theirs", options.peer_leases, options))
    else:
        print("python-redis-lock is not installed: pip install python-redis-lock")
    print("* the fewest that were there at a time, seen from another process")


if __name__ == "__main__":
    main()
