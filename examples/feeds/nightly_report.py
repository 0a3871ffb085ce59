"""A plain function run as cron would, on several machines at once: one of them writes the report.

```
0 3 * * *  python -m examples.feeds.nightly_report
```
"""

import time

from only_one import only_one, subscribe

from .journal import directory, note, note_skip, witnessed

ROW = "nightly-report"


@only_one("nightly-report")
def main() -> None:
    """Write how many entries each feed has."""
    with witnessed(ROW):
        lines = [f"{len(feed.read_text().splitlines()):5}  {feed.stem}" for feed in directory().glob("*.feed")]
        time.sleep(1.5)  # a real report takes its time
        (directory() / "report.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    subscribe(note_skip)
    note("tick", ROW)
    main()
