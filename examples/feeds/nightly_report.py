"""A plain function run as cron would, on several machines at once: one of them writes the report.

```
0 3 * * *  python -m examples.feeds.nightly_report
```
"""

from __future__ import annotations

import time

from only_one import only_one, subscribe

from . import store
from .journal import directory, note, note_event, witnessed
from .patience import PATIENCE

ROW = "nightly-report"


@only_one("nightly-report", lease=5 * PATIENCE)
def main() -> None:
    """Write how many entries each feed has."""
    with witnessed(ROW):
        lines = [f"{count:5}  {feed_url}" for feed_url, count in store.count()]
        time.sleep(1.5)  # a real report takes its time
        (directory() / "report.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    subscribe(lambda event: note_event(event, ROW))
    note("tick", ROW)
    main()
