"""What to run to install an optional part of lineclear, from where this installation came."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return the pip command that adds `extra` to this installation.

    It names the place from which lineclear was installed, if that was a file, a folder or a repository (PEP 610):
    an index need not have it.
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
