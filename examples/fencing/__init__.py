"""A writer that is paused past its lease, and a store that refuses its late write: `python -m examples.fencing`.

A lock cannot stop a process that does not know yet that it has lost it: only the store that is written to can.
Each run is given a number that is higher than that of every run before it (`current_lock().fence`), sends it with each
write, and the store refuses what is lower than the highest it has seen.

| file | what it is |
|---|---|
| `store.py` | the store: SQLite, and one `WHERE` |
| `writer.py` | the writer: a covered function that says what becomes of it |
| `__main__.py` | pauses one writer, runs another, lets the first go on |
"""
