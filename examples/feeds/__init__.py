"""A feed importer whose schedule is shorter than its runs: `python -m examples.feeds` shows what becomes of it.

| file | what it is |
|---|---|
| `app.py` | the Celery application: `import_feed`, a class-based task, and the schedule of both |
| `journal.py` | the witness: what ran when, written without the lock |
| `picture.py` | the journal for people: rows over time |
| `__main__.py` | starts all of it, kills one worker process, and ends |
"""
