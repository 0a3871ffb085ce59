"""docs/recipes/prometheus.md: one scrape has the sums of both processes of a real worker."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from rigs.servers import free_ports
from rigs.waiting import LIMIT, eventually
from tests.recipes.helpers import SlowFile, caller, shop

EXAMPLE = "examples.recipes.prometheus"
TASK = "import_prices"


def test_a_scrape_has_the_sums_of_all_processes(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    files = tmp_path / "metrics"
    files.mkdir()
    env = {"PROMETHEUS_MULTIPROC_DIR": str(files), "METRICS_PORT": str(port)}

    def scraped() -> dict[str, float]:
        try:
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
                lines = answer.read().decode().splitlines()
        except HTTPError as error:
            # prometheus_client cannot read the file of a process that has created it and not yet lengthened it.
            if error.code != 500:
                raise
            return {}
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def counted(event: str) -> float:
        return scraped().get(f'only_one_events_total{{event="{event}",task="{TASK}"}}', 0)

    teas, mugs = SlowFile(tmp_path / "teas"), SlowFile(tmp_path / "mugs")
    with shop(EXAMPLE, tmp_path) as place, place.worker("worker", 2, **env), caller(place.url) as app:
        app.send_task(TASK, [teas.path])
        assert eventually(teas.is_read)
        app.send_task(TASK, [teas.path])  # which the other process skips
        assert eventually(lambda: counted("Busy") == 1)
        app.send_task(TASK, [mugs.path])
        assert eventually(mugs.is_read)  # while the first process is still at the other file
        assert counted("Acquired") == 2
        for each in (teas, mugs):
            each.give("1\n2\n")
        assert eventually(lambda: counted("Released") == 2)
        assert counted("Busy") == 1
        assert eventually(lambda: scraped().get(f'only_one_run_seconds_count{{task="{TASK}"}}') == 2)
        assert scraped()[f'only_one_run_seconds_sum{{task="{TASK}"}}'] > 0

        app.send_task(TASK, [teas.path])
        assert eventually(teas.is_read)
        app.backend.client.set(f"only_one:{TASK}:{teas.path}", "somebody else's")
        teas.give("1\n")
        assert eventually(lambda: counted("Lost") == 1)

        assert len(list(files.glob("counter_*.db"))) == 2  # one of each process
