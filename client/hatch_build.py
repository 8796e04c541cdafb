"""Generates the client for threads before hatchling packs it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GeneratedClient(BuildHookInterface):  # type: ignore[type-arg]
    """The hook hatchling calls before it packs."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Generate the files, which git ignores, and add them to the wheel."""
        runpy.run_path(str(Path(self.root) / "generate_sources.py"))["main"]()
        generated = ("_sync/*.py", "call_params.py", "message_classes.py")
        build_data["artifacts"] += [f"/lineclear/client/{name}" for name in generated]
