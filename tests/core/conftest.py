"""`pytest tests/core --update-transcripts` rewrites the transcripts; read the diff before you commit it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-transcripts`, which pytest knows when this folder is on the command line."""
    parser.addoption("--update-transcripts", action="store_true", help="write down what the scheduler does now")
