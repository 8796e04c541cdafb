"""The streams that groups of requests read in a simulation, in place of the server's OutputStream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from support.events import TokensReady

from lineclear.errors import Cancelled, LineclearError
from lineclear.scheduler.core.events import Failed, Finished, Started
from lineclear.scheduler.requests.output_stream import OutputChunk

_EMPTY = {
    "error": None,
    "queued": None,
    "started": None,
    "end": None,
    "token_ids": (),
    "texts": (),
    "logprobs": (),
    "times": (),
}


class SimulatedStream:
    """The stream of one request of the core; `cancel` ends the request."""

    index = 0

    def __init__(self, engine_id: str, cancel: Callable[[LineclearError], object]) -> None:
        self.engine_id = engine_id
        self.cancel = cancel
        self.is_read = False
        self._is_started = False
        self._chunks: deque[Any] = deque()
        self._on_output: Callable[[], object] = lambda: None

    def admission(self) -> Future[None]:
        """Return a future that is done when the request is admitted."""
        return Future()

    def subscribe(self, on_output: Callable[[], object]) -> None:
        """Call `on_output()` with each output."""
        self._on_output = on_output

    @property
    def has_output(self) -> bool:
        return bool(self._chunks)

    def read_nowait(self) -> Any:
        return self._chunks.popleft()

    def deliver(self, event: Any) -> None:
        """Append the output of an event of the core."""
        if isinstance(event, Started):
            self._is_started = True
            self._add(started=event)
        elif isinstance(event, TokensReady):
            self._add(token_ids=event.tokens, logprobs=event.logprobs)
        elif isinstance(event, Finished):
            # The simulation ends requests as for a stop string, also those that have not started.
            self._add(end=event if self._is_started else None, error=None if self._is_started else Cancelled(""))
        elif isinstance(event, Failed):
            self._add(error=event.error)

    def fail(self, error: LineclearError | None) -> None:
        self._add(error=error)

    def _add(self, **fields: Any) -> None:
        self._chunks.append(SimpleNamespace(**_EMPTY | fields))
        self._on_output()


class SimulatedOutput:
    """An output that a group chooses at its end."""

    def __init__(self) -> None:
        self.text = None
        self.seed_index, self.score = 0, 0.0
        self.error: LineclearError | None = None
        self.started: Started | None = None
        self.tokens: tuple[int, ...] | None = None
        self.model = ""

    def on_admitted(self, queued: object) -> None:
        """Note that the request is admitted."""

    def cancel(self, error: LineclearError) -> None:
        """End the output with an error."""
        self.error = self.error or error

    def deliver(self, chunk: OutputChunk) -> None:
        """Take the whole output."""
        assert chunk.started is not None
        self.model, self.tokens = chunk.started.model_fingerprint, tuple(chunk.token_ids)
