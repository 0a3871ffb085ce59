"""What a worker's main process does for runs that were killed is done in threads, and the pool forks new children."""

from __future__ import annotations

import os
import threading
import time

import pytest

from only_one.tasks import endings


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_no_child_is_forked_while_a_thread_is_at_work() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        with endings._at_work:
            begun.set()
            time.sleep(0.2)  # how long the work takes
            ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(10)
    child = os.fork()
    if not child:
        is_free = ended.is_set() and endings._at_work.acquire(timeout=5)
        os._exit(0 if is_free else 1)
    thread.join()

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not endings._at_work.locked()
