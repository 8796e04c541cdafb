"""The requests of a server as a whole: their statistics, and their end at the shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from lineclear.errors import LineclearError, ServerDraining, ShutdownInterrupted
from lineclear.scheduler.engine.engine_stats import WantedWorker
from lineclear.scheduler.requests import status_messages
from lineclear.scheduler.requests.admission import Admission
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.services import RequestServices
from lineclear.scheduler.requests.session import Session
from lineclear.scheduler.requests.submitted_requests import SubmittedRequests
from lineclear.v1 import inference_pb2 as pb

_FRESH_SECONDS = 0.5


class RequestManager:
    """Live requests, submitted answers and sessions. On the event loop that runs when it is created."""

    def __init__(self, services: RequestServices, wanted_workers: Callable[[], Sequence[WantedWorker]] = tuple) -> None:
        """`wanted_workers` returns the workers that the server keeps running, for the statistics."""
        self.services = services
        self.requests = Admission(services)
        self.submitted = SubmittedRequests(services.settings, services.quota.retry_after_seconds)
        self.sessions: set[Session] = set()
        self._wanted_workers = wanted_workers
        self._loop = asyncio.get_running_loop()
        self._drain_ends_at: float | None = None

    def adapter_failed(self, key: bytes, problem: str) -> None:
        """Forget an adapter that a worker cannot load. Thread-safe."""
        self._loop.call_soon_threadsafe(self.services.adapters.failed, key, problem)

    def refuse(self, error: Callable[[], LineclearError]) -> None:
        """Reject new requests with `error()`: the server shuts down, or will get no worker."""
        self.services.model.reject(error)
        for session in self.sessions:
            session.drain(error())

    async def drain(self, timeout_seconds: float) -> None:
        """Reject new requests, wait for those in progress, and end the rest with ShutdownInterrupted."""
        services = self.services
        self.refuse(lambda: ServerDraining("the server is shutting down", retry_after_seconds=1.0))
        services.engine.drain()
        self._drain_ends_at = services.clock() + timeout_seconds
        try:
            async with asyncio.timeout(timeout_seconds):
                await services.streams.wait_until_idle()
        except TimeoutError:
            self.fail_all(shutdown_interrupted)

    @property
    def drain_remaining_seconds(self) -> float | None:
        """Time until the drain ends the remaining requests; None without a drain."""
        return None if self._drain_ends_at is None else max(0.0, self._drain_ends_at - self.services.clock())

    def fail_all(self, error: Callable[[RequestContext], LineclearError]) -> None:
        """Cancel every request. Each client gets the error after the tokens before it."""
        for request in self.requests:
            request.cancel(error(request))

    def close(self) -> None:
        """Stop threads and processes. No call may be in progress."""
        self.services.close()

    def describe_model(self) -> pb.GetModelResponse:
        """Describe the served model. Raises the reason for its absence before the first worker has joined."""
        services = self.services
        response = status_messages.model(
            services.settings, services.model.require_hello(), services.engine.snapshot().core.num_slots
        )
        response.has_chat_template = services.tokenizers.has_chat_template
        response.has_structured_output = services.grammars.is_available
        response.tool_call_parser, response.reasoning_parser = services.parsers.tool_calls, services.parsers.reasoning
        for adapter in services.adapters.all():
            response.adapters.add(name=adapter.name, digest=adapter.files.key.hex(), rank=adapter.files.rank)
        return response

    async def status(self) -> pb.GetStatsResponse:
        """Return counters and gauges of all tenants. Requests are counted as their callers see them."""
        services = self.services
        try:
            snapshot = await asyncio.wait_for(asyncio.wrap_future(services.engine.fresh_snapshot()), _FRESH_SECONDS)
        except TimeoutError:  # the engine is stuck
            snapshot = services.engine.snapshot()
        wanted, now = self._wanted_workers(), services.clock()
        stats = status_messages.stats(services.settings, snapshot, services.stats, wanted, now)
        stats.counters.requests_admitted = services.quota.num_admitted
        gauges, shares = stats.gauges, self.requests.fairness.shares()
        # Between two steps a beam search has no request in the core, so its beams are counted where the search is.
        gauges.num_requests_running += sum(request.answer.num_running_beams for request in self.requests)
        gauges.open_streams, gauges.asyncio_tasks = len(self.requests), len(asyncio.all_tasks())
        gauges.num_lora_adapters = len(services.adapters.all())
        gauges.fairness_index, gauges.fairness_gap_tokens = shares.index, shares.gap_tokens
        return stats


def shutdown_interrupted(request: RequestContext) -> ShutdownInterrupted:
    """Return the error for a request that the server does not finish; its metadata lets another server resume it."""
    seed = request.validated.sampling.seed
    return ShutdownInterrupted(
        "the server shut down before the answer was complete; send the request to another server",
        retry_after_seconds=1.0,
        metadata={"next_index": str(request.outputs[0].num_received), "seed": str(seed)},
    )
