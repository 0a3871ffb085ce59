"""docs/recipes/sentry.md: what the SDK would send of runs in a process of its own."""

from __future__ import annotations

import json
import sys

from tests.decorated import token_of_the_dead
from tests.recipes.place import Place

REPORTS = """
import json, os, sentry_sdk
from redis import Redis
from examples.recipes.sentry import import_prices
from only_one import Acquired, subscribe
from rigs.waiting import eventually

sent = []
sentry_sdk.get_client().transport.capture_envelope = lambda envelope: sent.append(envelope.get_event())
client = Redis.from_url(os.environ["ONLY_ONE_REDIS_URL"])
subscribe(lambda event: isinstance(event, Acquired) and client.set(event.key, "somebody else's"))
assert import_prices.apply(["prices"]).get() == 2  # which takes over the key of a dead process, and loses it
assert import_prices.apply(["prices"]).failed()  # as its key is busy
eventually(lambda: len(sent) == 2)
print(json.dumps(sent))
"""


def test_losses_and_dead_holders_are_reported_and_skips_are_not(place: Place) -> None:
    (place.folder / "prices").write_text("1\n2\n")
    key = "only_one:import_prices:prices"
    place.client.set(key, token_of_the_dead())
    ran = place.run(sys.executable, "-c", REPORTS, SENTRY_DSN="http://public@127.0.0.1:1/1")
    assert ran.returncode == 0, ran.stderr
    events = json.loads(ran.stdout.splitlines()[-1])
    for event, kind, message in zip(events, ("Reclaimed", "Lost"), ("took over", "lost"), strict=True):
        assert event["message"].startswith(f"import_prices {message} {key} ")
        assert (event["level"], event["tags"]["only_one.key"]) == ("warning", key)
        assert event["fingerprint"] == ["only_one", kind, "import_prices"]
