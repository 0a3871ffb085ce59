"""`celery -A proj only-one`: the same commands as `python -m only_one`, with the settings of a Celery app."""

from __future__ import annotations

import sys
from typing import Any

import click

from only_one.cli import main


@click.command(
    "only-one",
    add_help_option=False,  # which is answered with the rest
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1)
@click.pass_context
def only_one(context: Any, arguments: tuple[str, ...]) -> None:
    """Look at the keys that are held, and free them."""
    sys.exit(main(arguments, program="celery only-one", app=context.obj.app))
