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
    """Write which feeds have been imported."""
    with witnessed(ROW):
        names = sorted(feed.stem for feed in directory().glob("*.feed"))
        time.sleep(1.5)  # a real report takes its time
        (directory() / "report.txt").write_text("\n".join(names))


if __name__ == "__main__":
    subscribe(note_skip)
    note("tick", ROW)
    main()
