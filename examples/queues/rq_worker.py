"""RQ: a worker that releases the keys of a work horse that was killed, so its job begins elsewhere at once."""

from typing import Any

from rq import Worker

from only_one.inspection import held, release_key


class ReleasingWorker(Worker):
    """Started with `rq worker --worker-class rq_worker.ReleasingWorker`."""

    def handle_work_horse_killed(self, job: Any, retpid: int, ret_val: int, rusage: Any) -> None:
        """Release what the dead child holds, before RQ retries its job."""
        for each in held():
            if each.process == "dead":  # it was of this machine
                release_key(each.key, each.value)
        super().handle_work_horse_killed(job, retpid, ret_val, rusage)
