"""Native threads: threads of the system, even where gevent or eventlet have replaced Python's."""

import sys
import threading
from collections.abc import Callable


def start_native_thread(name: str, run: Callable[..., None], *args: object) -> RuntimeError | None:
    """Start a daemon thread of the system. A greenlet in its place would starve beside work that does not wait.

    Returns:
        The error if the thread cannot be started: at a limit of threads, or while the interpreter shuts down.
    """
    try:
        if (gevent := sys.modules.get("gevent.monkey")) and gevent.is_module_patched("threading"):
            gevent.get_original("_thread", "start_new_thread")(run, args)
        elif (eventlet := sys.modules.get("eventlet.patcher")) and eventlet.is_monkey_patched("thread"):
            eventlet.original("_thread").start_new_thread(run, args)
        else:
            threading.Thread(target=run, args=args, name=name, daemon=True).start()
    except RuntimeError as error:
        return error
    return None
