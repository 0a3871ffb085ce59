"""No copy of a message is dropped before the result is there that its run has to store, and what comes after it."""

from __future__ import annotations

from pathlib import Path

from celery import chain

from only_one.testing import redis_server
from tests.live import lost_result_app as live
from tests.live.crew import Witness, celery_worker, environment, sender
from tests.waiting import LIMIT


def test_a_run_that_is_killed_between_its_release_and_its_result_is_done_again(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "witness")
    with redis_server() as server, sender(live.app, server.url):
        env = environment(server.url, witness.path)
        with celery_worker("tests.live.lost_result_app", tmp_path / "log", env, size=2):
            result = chain(live.work.s(), live.follow.s()).apply_async()

            assert result.get(timeout=LIMIT) == "second, followed"
            assert result.parent.get(timeout=LIMIT) == "second"

    # A copy had asked before the run ended, or it would have been done again without any of this.
    assert len(witness.lines("killed")) == 1
    assert witness.lines("begin") == witness.lines("end") == [[result.parent.id]] * 2
