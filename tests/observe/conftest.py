"""Run the tests of this folder on the event loop that the server uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from observe.status_viewer import TOKEN
from support.scheduler_fixtures import model, pytest_asyncio_loop_factories, s, start

__all__ = ["model", "pytest_asyncio_loop_factories", "s", "start"]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Return a token file with one operator."""
    path = tmp_path / "tokens"
    path.write_text(f"operator {TOKEN}\n")
    path.chmod(0o400)
    return path
