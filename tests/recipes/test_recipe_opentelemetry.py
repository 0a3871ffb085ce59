"""docs/recipes/opentelemetry.md: the SDK exports what happened in the producer, and what happened in a worker."""

from __future__ import annotations

import re
import shutil
import sys

from tests.live.workers import ROOT
from tests.recipes.place import Place

EXPORTED = r'"event": "only_one\.(\w+)"'


def test_the_producer_and_the_worker_both_count(place: Place) -> None:
    shutil.copy(ROOT / "examples" / "recipes" / "opentelemetry.py", place.folder / "shop.py")
    (place.folder / "prices.txt").write_text("tea 3\n")
    produced = place.run(sys.executable, "shop.py")  # which exports once, at its end
    assert re.findall(EXPORTED, produced.stdout) == ["busy"]
    place.env["OTEL_METRIC_EXPORT_INTERVAL"] = "200"
    with place.running("worker", "celery", "-A", "shop", "worker", "-l", "INFO", "-c", "1"):
        place.wait_for("worker", '"event": "only_one.released"')
    assert {*re.findall(EXPORTED, place.log("worker"))} == {"acquired", "released"}
