"""A run that writes late: `python -m examples.fencing.writer DATABASE TEXT` waits for a line on stdin in between.

The server is that of `ONLY_ONE_REDIS_URL`.
"""

import sys
from pathlib import Path

from only_one import current_lock, only_one

from .store import StaleWrite, write


@only_one("report", lease=3)
def write_report(database: str, text: str) -> str:
    """Write the report once its text is known, and say what has become of it.

    Args:
        database: the store's file.
        text: what is in the report.

    Returns:
        "written" or "refused".
    """
    # Asked for before the work is begun: so whoever begins later has a higher one, however long this takes.
    fence = current_lock().fence
    print("begun", flush=True)
    sys.stdin.readline()  # here, a real one computes
    try:
        write(Path(database), "report", text, fence)
    except StaleWrite:
        return "refused"
    return "written"


if __name__ == "__main__":
    print(write_report(*sys.argv[1:]) or "skipped", flush=True)
