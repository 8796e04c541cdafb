"""Run the tests of this folder on the event loop that the server uses."""

from support.scheduler_fixtures import model, pytest_asyncio_loop_factories, s, start

__all__ = ["model", "pytest_asyncio_loop_factories", "s", "start"]
