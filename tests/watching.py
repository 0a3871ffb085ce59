"""Another process that looks at keys all the time, and sees whether their runs keep them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WATCH = """
import json, select, sys
import redis
client, keys = redis.Redis.from_url(sys.argv[1]), sys.argv[2:]
seen = {key: {"polls": 0, "missing": 0, "longest": 0, "values": []} for key in keys}
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.005)[0]:
    for key, found in seen.items():
        value, expiry = client.pipeline().get(key).pttl(key).execute()
        found["polls"] += 1
        found["missing"] += expiry <= 0
        found["longest"] = max(found["longest"], expiry)
        if value and value.decode() not in found["values"]:
            found["values"].append(value.decode())
print(json.dumps(seen), flush=True)
"""


@contextmanager
def watched(url: str, *keys: str) -> Iterator[dict[str, Any]]:
    """Another process that looks at keys during the block; what it has seen is known after it."""
    seen: dict[str, Any] = {}
    command = [sys.executable, "-c", WATCH, url, *keys]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield seen
        process.stdin.close()
        seen.update(json.loads(process.stdout.read()))


def assert_kept(seen: dict[str, Any], keys: list[str], lease: float) -> None:
    """All of the keys were there all the time, never for longer than a lease, and each was one run's."""
    assert list(seen) == keys
    for found in seen.values():
        assert found["polls"] > 20
        assert found["missing"] == 0
        assert 0 < found["longest"] <= lease * 1000
        assert len(found["values"]) == 1
