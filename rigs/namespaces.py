"""Another machine, as far as anybody here can know: a process in namespaces of its own."""

from __future__ import annotations

import shutil
import subprocess

TRIES_FOR = 120.0
"""Seconds that trying it out may take."""

MACHINE = ("--pid", "--uts", "--mount-proc")


def unshare(*namespaces: str) -> list[str] | None:
    """The command that starts another in namespaces of its own, or None where that is not permitted."""
    program = shutil.which("unshare")
    if program is None:
        return None
    for user in ([], ["--user", "--map-root-user"]):
        command = [program, *user, "--fork", "--kill-child", *namespaces]
        tried = subprocess.run([*command, "true"], capture_output=True, check=False, timeout=TRIES_FOR)
        if tried.returncode == 0:
            return command
    return None


def elsewhere(name: str = "elsewhere") -> list[str] | None:
    """The command that starts another as on a machine of that name, or None where that is not permitted."""
    inside = unshare(*MACHINE)
    return [*inside, *host_named(name)] if inside else None


def host_named(name: str) -> list[str]:
    """The command that starts another where the host has that name, within a namespace."""
    return ["sh", "-c", f'hostname {name} && exec "$@"', "sh"]
