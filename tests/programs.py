"""Examples as programs: started as a user starts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rigs.programs import Logged

ROOT = Path(__file__).parents[1]


def program(module: str, folder: Path, *arguments: object, **environment: str) -> Logged:
    """Run an example for the length of a `with` block.

    Args:
        module: its module.
        folder: for its files, and for what it prints.
        arguments: its command line.
        environment: further variables of its environment.
    """
    log = folder.with_name(f"{folder.name}-{len(list(folder.parent.iterdir()))}.log")
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "TMPDIR": str(folder), **environment}
    return Logged([sys.executable, "-m", module, *map(str, arguments)], log, cwd=ROOT, env=env)
