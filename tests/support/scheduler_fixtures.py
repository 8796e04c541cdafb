"""Fixtures: a server in this process over a fake engine, and schedulers that run as processes with toy workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from support.processes import Running, starting
from support.serving import Serving, serving
from support.small_tokenizers import byte_level, save


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run the tests of this directory on the event loop that the server uses."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture
def start(model: Path) -> Iterator[Callable[..., Running]]:
    with starting(model) as start_scheduler:
        yield start_scheduler


@pytest.fixture
async def s(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with the default settings and a joined worker, for tests that need no others."""
    async with serving(tmp_path) as s:
        yield s
