"""docs/recipes/opentelemetry.md: the SDK exports what happened in the producer, and what happened in a worker."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter

from rigs.waiting import eventually
from tests.live.workers import ROOT
from tests.recipes.place import Place


def counted(exported: str) -> Counter[tuple[str, int]]:
    """The points of the last export: each event, and how often it happened."""
    last = exported[exported.rfind('"resource_metrics"') :]
    return Counter(
        (event, int(number))
        for event, number in re.findall(
            r'"event": "only_one\.(\w+)",\s*"task": "import_prices"\s*\},.*?"value": (\d+)', last, re.DOTALL
        )
    )


def test_the_producer_and_the_worker_both_count(place: Place) -> None:
    shutil.copy(ROOT / "examples" / "recipes" / "opentelemetry.py", place.folder / "shop.py")
    (place.folder / "prices.txt").write_text("tea 3\n")
    place.env["OTEL_METRIC_EXPORT_INTERVAL"] = "200"
    produced = place.run(sys.executable, "shop.py")
    assert counted(produced.stdout) == Counter([("busy", 1)]), produced.stdout
    with place.running("worker", "celery", "-A", "shop", "worker", "-l", "INFO", "-c", "1"):
        assert eventually(
            lambda: counted(place.log("worker")) == Counter([("acquired", 1), ("released", 1)]), pause=0.1
        )
