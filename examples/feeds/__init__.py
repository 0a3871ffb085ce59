"""A feed importer whose schedule is shorter than its runs: `python -m examples.feeds` shows what becomes of it.

| file | what it is |
|---|---|
| `app.py` | the Celery application: `import_feed`, and the schedule |
| `single_task.py` | a class-based task of which one runs at a time |
| `nightly_report.py` | a plain function, run as cron would |
| `store.py` | where entries go: SQLite |
| `feed_server.py` | RSS and Atom over HTTP, slowly |
| `cron.py` | cron on three machines, for `nightly_report.py` |
| `journal.py`, `recording.py` | the witness: what ran when, written without the lock |
| `history.py` | the journal as ticks, runs, skips and overlaps |
| `timeline.py`, `summary.py` | the same for people |
| `timeline_svg.py` | the same as a picture for a page |
| `demo.py` | starts all of it, kills one worker child, and ends |
"""
