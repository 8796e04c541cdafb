"""`lineclear serve`: becomes the scheduler, which starts its worker. Decides only whether that can work."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from . import exits, screen

MODULE = "lineclear.scheduler.main"
# requirement; markers and extra == "name", as in the metadata of a package
_REQUIREMENT = re.compile(r"""^([A-Za-z0-9._-]+)[^\[;]*;\s*extra\s*==\s*['"](?:scheduler|worker)['"]\s*$""")


def run(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the scheduler. Exits with a sentence where its packages are not installed."""
    if absent := missing():
        screen.note(f"error: a server needs more than the client: {', '.join(absent)} is not installed", "bold red")
        screen.note("pip install 'lineclear[all]' brings scheduler and worker")
        raise typer.Exit(exits.USAGE)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(arguments))


def command(arguments: Sequence[str]) -> list[str]:
    """The scheduler's command line. -P: a file in the working directory must not take the place of a package."""
    return [sys.executable, "-P", "-m", MODULE, "--spawn-worker", *arguments]


def missing() -> list[str]:
    """The packages of the extras `scheduler` and `worker` that are not there, by their name in the registry."""
    found = (_REQUIREMENT.match(line) for line in importlib.metadata.requires("lineclear") or ())
    absent = sorted({match[1] for match in found if match is not None and not _installed(match[1])})
    if not absent and importlib.util.find_spec("lineclear.scheduler") is None:
        return ["lineclear.scheduler"]
    return absent


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return importlib.util.find_spec(name.replace("-", "_")) is not None
    return True
