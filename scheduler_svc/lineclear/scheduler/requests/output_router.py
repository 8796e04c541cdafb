"""Carry the engine's events to the event loop, and route them to the output streams of their requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from lineclear.errors import LineclearError
from lineclear.scheduler.core.events import (
    Admitted,
    Event,
    Failed,
    Finished,
    Pooled,
    Preempted,
    Scored,
    Started,
    StepTokens,
    WorkerJoined,
    WorkerLost,
)
from lineclear.scheduler.engine.engine_stats import TokenRate
from lineclear.scheduler.requests import output_stream
from lineclear.scheduler.requests.engine_api import EngineApi
from lineclear.scheduler.requests.output_stream import OutputLimits, OutputStream
from lineclear.scheduler.requests.tenant_limits import QueuePlace
from lineclear.scheduler.text.detokenizer import AnswerText
from lineclear.wire.messages import Scores


class OutputRouter:
    """The open output streams, by the engine's id of their request.

    `on_worker` is called when a worker joins (True) or is lost. `incident` maps a bug to the error that clients get.
    `rate` counts output tokens. On the event loop that runs when it is created; the engine's thread calls `publish`.
    """

    def __init__(
        self,
        engine: EngineApi,
        max_unread_tokens: int,
        on_worker: Callable[[bool], None],
        incident: Callable[[BaseException], LineclearError],
        rate: TokenRate,
        clock: Callable[[], float],
    ) -> None:
        self.on_fatal: Callable[[BaseException], None] = lambda error: None
        """Called after an event that could not be delivered."""
        self.is_closed = False
        """The event loop ends: events are dropped."""
        self._engine = engine
        self._limits = OutputLimits(max_unread_tokens, output_stream.MAX_UNREAD_BYTES)
        self._on_worker = on_worker
        self._incident = incident
        self._rate, self._clock = rate, clock
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, OutputStream] = {}
        self._numbers = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self,
        request_id: str,
        text: AnswerText | None,
        queue_place: QueuePlace | None = None,
        *,
        wants_times: bool = False,
        num_received: int = 0,
        index: int = 0,
        encode_scores: Callable[[Scores], bytes] | None = None,
    ) -> OutputStream:
        """Open the stream of an output that is about to be submitted to the engine under `stream.engine_id`."""
        # A client may reuse a request_id at once, while events of its first request are still under way.
        engine_id = f"{request_id}~{next(self._numbers)}"
        stream = OutputStream(
            engine_id, text, self._engine, queue_place, self._limits, wants_times, num_received, index, encode_scores
        )
        self._streams[engine_id] = stream
        self._idle.clear()
        return stream

    def close(self, stream: OutputStream, error: LineclearError | None) -> None:
        """Close a stream after its last read. A request that the engine still has is cancelled with `error`."""
        del self._streams[stream.engine_id]
        stream.close(error)
        if not self._streams:
            self._idle.set()

    async def wait_until_idle(self) -> None:
        """Return when no stream is open."""
        await self._idle.wait()

    def publish(self, events: Sequence[Event]) -> None:
        """Deliver events of the engine. Thread-safe; does not wait."""
        try:
            self._loop.call_soon_threadsafe(self._deliver, list(events), self._clock())
        except RuntimeError:  # the loop is closed
            if not self.is_closed:
                raise

    def _deliver(self, events: Sequence[Event], at: float) -> None:
        try:
            self.dispatch(events, at)
        except Exception as error:  # the loop would only log it, and streams would wait forever
            self.on_fatal(error)

    def dispatch(self, events: Sequence[Event], at: float) -> None:
        """Deliver the engine's events. `at` is the monotonic time of their creation."""
        streams = self._streams
        for event in events:
            if isinstance(event, StepTokens):  # most of the work: one call for each row of a step
                self._rate.add(len(event), at)
                columns = (event.request_ids, event.indices, event.tokens, event.logprobs or repeat(None))
                for request_id, index, token_id, logprobs in zip(*columns, strict=False):
                    stream = streams.get(request_id)
                    if stream is not None:
                        try:
                            stream.on_token(index, token_id, logprobs, at)
                        except AssertionError:
                            raise  # a wrong event of the engine, not a bug in one answer's text
                        except Exception as error:
                            self._fail(stream, error)
            elif isinstance(event, WorkerJoined | WorkerLost):
                self._on_worker(isinstance(event, WorkerJoined))
            else:
                stream = streams.get(event.request_id)
                if stream is not None:  # None after its reader closed it
                    try:
                        _HANDLERS[type(event)](stream, event)
                    except AssertionError:
                        raise
                    except Exception as error:
                        self._fail(stream, error)

    def _fail(self, stream: OutputStream, error: Exception) -> None:
        """End one request with an incident, so that a bug in its text or its reader does not end the others."""
        stream.cancel(self._incident(error), discard_unread=True)


_HANDLERS: dict[type[Event], Callable[[OutputStream, Any], None]] = {
    Admitted: lambda stream, event: stream.on_admitted(event.position),
    Preempted: lambda stream, event: None,
    Started: OutputStream.on_started,
    Scored: OutputStream.on_scored,
    Pooled: OutputStream.on_pooled,
    Finished: OutputStream.on_finished,
    Failed: OutputStream.on_failed,
}
