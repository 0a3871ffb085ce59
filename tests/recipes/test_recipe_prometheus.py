"""docs/recipes/prometheus.md: one scrape has the sums of both processes of a real worker."""

from __future__ import annotations

import re

import httpx
import yaml

from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually
from tests.live.workers import ROOT
from tests.recipes.place import Place, SlowFile

TASK = "import_prices"
ALERTS = yaml.safe_load((ROOT / "examples" / "recipes" / "alerts.yml").read_text())["groups"][0]["rules"]


def test_a_scrape_has_the_sums_of_all_processes(place: Place) -> None:
    (port,) = free_ports(1)
    files = place.folder / "metrics"
    files.mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(files), "METRICS_PORT": str(port)}

    def scraped(name: str) -> float:
        # The answer is 500 where a process has created its file and not yet lengthened it.
        lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT).text.splitlines()
        return next((float(line.split()[-1]) for line in lines if line.startswith(name)), 0)

    def counted(event: str) -> float:
        return scraped(f'only_one_events_total{{event="{event}",task="{TASK}"}}')

    teas, mugs = SlowFile(place.folder / "teas"), SlowFile(place.folder / "mugs")
    with place.worker("examples.recipes.prometheus", 2, **env), place.caller() as app:
        app.send_task(TASK, [teas.path])
        assert eventually(teas.is_read)
        app.send_task(TASK, [teas.path])  # which the other process skips
        assert eventually(lambda: counted("Busy") == 1)
        assert scraped(f'only_one_held_seconds{{task="{TASK}"}}') > 0
        served = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT).text
        for alert in ALERTS:
            metric, kind = re.findall(r"(only_one_\w+)(?:{event=\"(\w+)\"})?", alert["expr"])[0]
            assert (f'{metric}{{event="{kind}",task="{TASK}"}} 0.0' if kind else metric) in served
        app.send_task(TASK, [mugs.path])
        assert eventually(mugs.is_read)  # while the first process is still at the other file
        place.client.set(f"only_one:{TASK}:{mugs.path}", "somebody else's")
        for each in (teas, mugs):
            each.give("1\n2\n")
        assert eventually(lambda: counted("Lost") == 1)
        assert eventually(lambda: scraped(f'only_one_run_seconds_count{{task="{TASK}"}}') == 2)
        assert [counted(event) for event in ("Acquired", "Busy")] == [2, 1]
        assert len(list(files.glob("counter_*.db"))) == 2  # one of each process
