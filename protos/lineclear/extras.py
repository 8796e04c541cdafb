"""The installed version, the pip command that installs an optional part of lineclear, and how to start its command.

The light client imports this module, so it is not in common/, whose modules need the packages of the processes.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

SERVER, CLIENT = "lineclear", "lineclear-client"
"""The project with everything, and the client alone, which lies in a folder of the former."""
_FOLDER = "/client"


def installed_version() -> str:
    """Return the version of lineclear, "unknown" for sources on PYTHONPATH."""
    found = _installed()
    return "unknown" if found is None else found[1].version


def install_command(extra: str) -> str:
    """Return the pip command that adds `extra` to this installation.

    It names the file, folder or repository from which lineclear was installed (PEP 610), if it did not come from an
    index. The extra `cli` is that of the installed project, the others are those of the server.
    """
    found = _installed()
    name, origin = SERVER, {}
    if found is not None:
        name, origin = found[0], json.loads(found[1].read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if name == CLIENT and extra != "cli":
        name, url = SERVER, url.removesuffix(_FOLDER)
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install --editable '{unquote(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" + ("#subdirectory=client" if name == CLIENT else "")
    return f"pip install '{name}[{extra}]{f' @ {url}' if url else ''}'"


def is_installed(package: str) -> bool:
    """Return whether a distribution of this name is installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def missing_package(error: ModuleNotFoundError, extra: str) -> str:
    """Return what to install for `error`. Raises `error` if the missing module is one of lineclear."""
    if error.name is None or error.name.startswith("lineclear"):
        raise error
    return f"the package {error.name} is not installed; run: {install_command(extra)}"


def lineclear_command() -> str:
    """Return what starts the `lineclear` of this interpreter in a shell here: its path, if PATH lacks it."""
    program = Path(sys.executable).with_name("lineclear")
    if not program.exists():
        return shlex.join([sys.executable, "-m", "lineclear.cli"])
    if (found := shutil.which("lineclear")) and Path(found).samefile(program):
        return "lineclear"
    here = Path.cwd()
    return shlex.quote(str(program.relative_to(here) if program.is_relative_to(here) else program))


def _installed() -> tuple[str, Distribution] | None:
    for name in (SERVER, CLIENT):
        try:
            return name, distribution(name)
        except PackageNotFoundError:
            pass
    return None
