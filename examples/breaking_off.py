"""For examples that start processes: whoever breaks one off ends what it has started, too."""

import signal
import sys
from collections.abc import Callable


def exit_status(main: Callable[[], int]) -> int:
    """Run a program's main function; Ctrl-C and SIGTERM are exceptions in it, so that its `with` blocks end.

    Args:
        main: what to run.

    Returns:
        What it returns; 130 after Ctrl-C.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts us with `&` has it ignored
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return main()
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended.", file=sys.stderr)
        return 130
