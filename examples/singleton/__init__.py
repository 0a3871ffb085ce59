"""The examples of celery-singleton's README, by one line above each task: `python -m examples.singleton`.

| its README | here |
|---|---|
| Quick start, How does it work? | `render` |
| Handling deadlocks | `rebuild`, which does nothing for it |
| `unique_on` | `send_digest` |
| `raise_on_duplicate` | `export` |
| `lock_expiry`, for safety | `poll` |
| `lock_expiry`, for one in a given time | `remind` |
| App configuration | `configured.py` |

| file | what it is |
|---|---|
| `tasks.py` | the tasks, each covered from queued to finished |
| `configured.py` | an app whose configuration says it for all of its tasks |
| `work.py` | what takes its time |
| `__main__.py` | queues them, starts a worker, and prints what comes of it |

docs/migration.md goes through the options one by one.
"""
