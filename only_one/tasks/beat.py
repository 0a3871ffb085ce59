"""What beat logs of a task that it does not send because its key is taken: one line, as nothing is wrong with it."""

from __future__ import annotations

import logging

from only_one.errors import AlreadyRunning


class _OneLine(logging.Filter):
    """Leaves out the traceback, and the stack that is in the message, too."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and isinstance(error.__cause__ or error.__context__, AlreadyRunning):
            record.msg, record.args, record.exc_info = str(error), (), None
        return True


logging.getLogger("celery.beat").addFilter(_OneLine())
