"""The pip command that installs an optional part of lineclear.

The light client imports this module, so it is not in common/, whose modules need the packages of the processes.
"""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the pip command that adds `extra` to this installation.

    It names the file, folder or repository from which lineclear was installed (PEP 610), if it did not come from an
    index.
    """
    try:
        origin: dict[str, Any] = json.loads(distribution("lineclear").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # sources on PYTHONPATH
        origin = {}
    url = origin.get("url", "")
    if origin.get("dir_info", {}).get("editable"):
        return f"pip install --editable '{unquote(urlsplit(url).path)}[{extra}]'"
    if "vcs_info" in origin:
        vcs = origin["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return f"pip install 'lineclear[{extra}]{f' @ {url}' if url else ''}'"
