"""For examples that start a worker: wait while it lives, fail in one line, and end it when they are interrupted."""

import signal
import sys
import time
from collections.abc import Callable
from math import inf

from only_one.errors import ConfigurationError
from only_one.testing import Guarded


def wait_for(what: str, condition: Callable[[], bool], worker: Guarded, limit: float = inf) -> None:
    """Wait for a condition while a worker lives.

    Args:
        what: the condition in words.
        condition: asked ten times a second.
        worker: the worker.
        limit: seconds to wait at most.

    Raises:
        ChildProcessError: the worker ended early.
        TimeoutError: it did not happen.
    """
    deadline = time.monotonic() + limit
    while not condition():
        if (status := worker.poll()) is not None:
            msg = f"the worker ended early, with status {status}"
            raise ChildProcessError(msg)
        if time.monotonic() > deadline:
            msg = f"waited {limit:.0f} s for {what}"
            raise TimeoutError(msg)
        time.sleep(0.1)


def exit_status(main: Callable[[], None]) -> int:
    """Run a program's main function; Ctrl-C and SIGTERM are exceptions in it, so that its `with` blocks end.

    Args:
        main: what to run.

    Returns:
        0; 1 if it raises OSError or ConfigurationError, whose message is printed; 130 after Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with `&` has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        main()
    except (OSError, ConfigurationError) as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended.", file=sys.stderr)
        return 130
    return 0
