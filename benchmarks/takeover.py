"""How soon a key is free after its holder was killed: from `kill -9` to the first line of the next call.

    python -m benchmarks.takeover [--rounds N] [--elsewhere N] [--seed N]

Each holder is a process of its own with `timeout=600`, so that no expiry can explain that the next call runs.
It is killed at a random moment of its run; what the system takes to end it is part of the time, as a zombie is alive.
Then the same with holders in another pid namespace, with another host name and a lease: nobody here can know that they
are dead, so the key is free when the lease has run out, and not before.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

import redis

from only_one import configure, only_one
from only_one.testing import redis_server

TIMEOUT = 600
LEASE = 2.0
LIMIT = 60.0
"""Seconds after which the key is not expected to be free any more."""

ELSEWHERE = [
    "--fork",
    "--kill-child",
    "--pid",
    "--uts",
    "--mount-proc",
    "sh",
    "-c",
    'hostname elsewhere && exec "$@"',
    "sh",
]

HOLDER = f"""
import sys, time
import only_one
only_one.configure(redis=sys.argv[1])

@only_one.only_one("takeover", **eval(sys.argv[2]))
def hold():
    print("begun", flush=True)
    time.sleep({TIMEOUT})

hold()
"""


@only_one("takeover", timeout=TIMEOUT)
def first_line() -> float:
    """When the call has got to its first line."""
    return time.perf_counter()


def elsewhere() -> list[str] | None:
    """The command that starts another as on another machine, or None where that is not permitted."""
    program = shutil.which("unshare")
    for user in ([], ["--user", "--map-root-user"]):
        command = [program or "", *user, *ELSEWHERE]
        if program and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return command
    return None


def measure_elsewhere(client: Any, url: str, inside: list[str], pause: float) -> tuple[float, float]:
    """Have a holder with a lease killed that seems to be on another machine.

    Returns:
        Seconds from the kill to the next call's first line, and what was left of the lease at the kill.

    Raises:
        RuntimeError: if the key was not free in time.
    """
    command = [*inside, sys.executable, "-c", HOLDER, url, f"dict(lease={LEASE})"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        if holder.stdout:
            holder.stdout.readline()
        time.sleep(pause)
        holder.kill()
        holder.wait()
        if holder.stdout:
            holder.stdout.read()  # which ends when the process within has ended
    killed = time.perf_counter()
    left = client.pttl("only_one:takeover") / 1000
    while (arrived := first_line()) is None:
        if time.perf_counter() > killed + LIMIT:
            msg = f"the key was not free {LIMIT:g} s after its holder was killed"
            raise RuntimeError(msg)
    return arrived - killed, left


def measure(url: str, pause: float) -> tuple[float, float, int]:
    """Have a holder killed.

    Args:
        url: the server.
        pause: seconds for which it holds the key first.

    Returns:
        Seconds from the kill to the next call's first line, those from when the process had ended, and how many calls
        were skipped in between.

    Raises:
        RuntimeError: if the holder did not hold its key, or the key was not free in time.
    """
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, f"dict(timeout={TIMEOUT})"], stdout=subprocess.PIPE
    ) as holder:
        try:
            begun = holder.stdout.readline() if holder.stdout else b""
            time.sleep(pause)
            if begun != b"begun\n" or first_line() is not None:
                msg = "the holder did not hold its key"
                raise RuntimeError(msg)
        finally:
            killed = time.perf_counter()
            holder.kill()
        holder.wait()
        ended = time.perf_counter()
    skipped = 0
    while (arrived := first_line()) is None:
        skipped += 1
        if time.perf_counter() > killed + LIMIT:
            msg = f"the key was not free {LIMIT:g} s after its holder was killed"
            raise RuntimeError(msg)
    return arrived - killed, arrived - ended, skipped


def report(what: str, seconds: list[float]) -> None:
    """Print one line."""
    print(f"{what:46} {statistics.median(seconds) * 1000:9.2f} {max(seconds) * 1000:9.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="holders that are killed (50)")
    parser.add_argument("--elsewhere", type=int, default=10, help="the same as on another machine (10)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of the moments of the kills")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    logging.getLogger("only_one").setLevel(logging.ERROR)  # each takeover is a warning
    moments = random.Random(options.seed)
    with redis_server() as server, configure(redis=server.url):
        print(f"redis-py {redis.__version__}, {options.rounds} rounds, timeout={TIMEOUT}, seed {options.seed}")
        found = []
        for number in range(1, options.rounds + 1):
            found.append(measure(server.url, moments.uniform(0, 0.2)))
            if number % 10 == 0 or number == options.rounds:
                print(f"{number} of {options.rounds}", file=sys.stderr)
        inside = elsewhere()
        with redis.Redis.from_url(server.url) as client:
            theirs = [
                measure_elsewhere(client, server.url, inside, moments.uniform(0, 2 * LEASE))
                for _ in range(options.elsewhere)
                if inside
            ]
    print(f"\n{'milliseconds':46} {'median':>9} {'worst':>9}")
    report("from kill -9 to the next call's first line", [total for total, _, _ in found])
    report("  of these, after the process had ended", [after for _, after, _ in found])
    print(f"skipped in between: {sum(skipped for *_, skipped in found)} calls")
    if not theirs:
        print("no pid namespace can be made here, so nothing is known of other machines")
        return
    report(f"on another machine, with lease={LEASE:g}", [total for total, _ in theirs])
    early = sum(total < left - 0.002 for total, left in theirs)
    late = max(total - left for total, left in theirs) * 1000
    print(f"before the lease had run out: {early} of {len(theirs)}; at the most {late:.2f} ms after it")


if __name__ == "__main__":
    main()
