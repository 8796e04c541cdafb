"""Changes of health while a message to a watcher is being written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from lineclear.scheduler.grpc_api.health_service import HealthService

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


class SlowContext:
    """A call whose writes block until `released` is set."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.started, self.released = asyncio.Event(), asyncio.Event()

    async def write(self, message: Any) -> None:
        self.written.append(message.status)
        self.started.set()
        await self.released.wait()


@pytest.mark.parametrize("closed", [("",), ("", "other")], ids=["its name", "all names"])
async def test_watcher_in_a_write_gets_the_close(closed: tuple[str, ...]) -> None:
    """The caller has the first message before the server's write returns, and may act on it at once."""

    health, context = HealthService(("", "other")), SlowContext()
    health.set(("",), True)
    watch = asyncio.ensure_future(health.Watch(HealthCheckRequest(), context))  # type: ignore[arg-type]
    await context.started.wait()
    health.close(closed)
    context.released.set()
    await watch
    assert context.written == [SERVING, NOT_SERVING]


async def test_change_reverted_during_a_write_is_not_sent() -> None:
    health, context = HealthService(("",)), SlowContext()
    watch = asyncio.ensure_future(health.Watch(HealthCheckRequest(), context))  # type: ignore[arg-type]
    await context.started.wait()
    health.set(("",), True)
    health.set(("",), False)
    context.released.set()
    health.close()
    await watch
    assert context.written == [NOT_SERVING]
