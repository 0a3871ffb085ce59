"""What a worker's main process does for runs that were killed is done in threads, and the pool forks new children."""

from __future__ import annotations

import os
import threading

import pytest

from only_one.tasks import endings
from tests.waiting import LIMIT


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_no_child_is_forked_while_a_thread_is_at_work() -> None:
    begun, about_to_fork, forked = threading.Event(), threading.Event(), threading.Event()
    os.register_at_fork(before=about_to_fork.set, after_in_parent=forked.set)  # before it, the last comes first
    meanwhile = []

    def work() -> None:
        with endings._at_work:
            begun.set()
            assert about_to_fork.wait(LIMIT)
            meanwhile.append(forked.wait(0.2))  # at once, if the lock were not waited for

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(LIMIT)
    child = os.fork()
    if not child:
        is_free = endings._at_work.acquire(timeout=LIMIT)
        os._exit(0 if is_free else 1)
    thread.join()

    assert meanwhile == [False]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not endings._at_work.locked()
