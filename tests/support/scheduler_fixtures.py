"""Fixtures for schedulers that run as processes: a model directory with only a tokenizer, and toy workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import uvloop
from support.processes import Running, starting
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
