"""One call with many requests: new output of all of them is sent in shared messages.

The tokens of one step travel as columns, everything else as one event for each request. A client that reads slowly gets
fewer, larger messages. Unread output is bounded by the output streams and the number of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from lineclear.api_limits import MAX_PIECE_BYTES, MAX_SESSION_COMMANDS, REQUEST_BYTES_KEY
from lineclear.errors import InvalidRequest, LineclearError, QueueFull
from lineclear.scheduler.requests.admission import Admission
from lineclear.scheduler.requests.output_stream import CHARACTER_BYTES, TOKEN_BYTES, OutputChunk, OutputStream
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.responses import read_output
from lineclear.scheduler.requests.services import Call
from lineclear.scheduler.requests.validate import request as validation
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity
from lineclear.status_codec import to_status
from lineclear.v1 import inference_pb2 as pb

MAX_REQUESTS = 1024  # in progress, as many as wait in the queue by default; a client opens another Session beyond

_MAX_UNSENT_FAILURES = 256


def session_headers(max_request_bytes: int) -> list[tuple[str, str]]:
    """Return the initial metadata of a session: the largest request in bytes."""
    return [(REQUEST_BYTES_KEY, str(max_request_bytes))]


class Session:
    """The requests of one Session call: `run` processes commands, `next_response` returns output. On one event loop.

    `check_access` raises Unauthenticated once the credentials of the call are no longer valid. `deadline` is the call's
    own, on the clock of the services, or None.
    """

    def __init__(
        self,
        admission: Admission,
        caller: Identity,
        tenant: str,
        check_access: Callable[[], None],
        deadline: float | None,
    ) -> None:
        self._admission = admission
        self._services = admission.services
        self._caller, self._tenant = caller, tenant
        self._check_access = check_access
        self._deadline = deadline
        self._live: dict[int, RequestContext] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: list[tuple[int, RequestContext, OutputStream]] = []  # outputs with unread parts
        self._failures: list[tuple[int, LineclearError]] = []  # rejected requests
        self._has_space = asyncio.Event()
        self._has_space.set()
        self._wakeup = asyncio.Event()
        self._input_closed = False
        self._drain_error: LineclearError | None = None  # ends the session once it is idle
        self._stream_error: LineclearError | None = None  # ends the session at once

    def __len__(self) -> int:
        """Return the number of its live requests."""
        return len(self._live)

    async def run(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        """Process commands until the client closes its side. An error of the stream itself ends the session."""
        try:
            async for message in messages:
                await self._handle(message)
        except LineclearError as error:
            self._stream_error = error
        except Exception as error:
            self._stream_error = self._services.incident(error)
        self._input_closed = True
        self._wakeup.set()

    def drain(self, error: LineclearError) -> None:
        """Reject new requests, and end the session with `error` once those in progress are complete."""
        self._drain_error = self._drain_error or error
        self._wakeup.set()

    def close(self) -> None:
        """Cancel all requests: the call has ended."""
        for task in self._tasks:
            task.cancel()
        for request in self._live.values():
            request.close()
        self._live.clear()

    async def _handle(self, message: pb.SessionRequest) -> None:
        count = len(message.submits) + len(message.cancels)
        if not 1 <= count <= MAX_SESSION_COMMANDS:
            raise InvalidRequest.at("submits", f"{count} commands; send 1 to {MAX_SESSION_COMMANDS} in a message")
        for index, command in enumerate(message.submits):
            await self._admit(f"submits[{index}].handle", command)
        for cancel in message.cancels:
            if (request := self._live.get(cancel.handle)) is None:
                continue
            if cancel.HasField("index"):
                request.cancel_output(cancel.index)
            else:
                request.cancel()

    async def _admit(self, field: str, command: pb.SubmitCommand) -> None:
        handle = command.handle
        arrival = await self._admission.pace(command.request)
        if handle in self._live:
            # An error event of this handle would end the live request.
            raise InvalidRequest.at(field, "belongs to another live request")
        try:
            self._start(handle, command, arrival)
        except LineclearError as error:
            self._reject(handle, error)
        except Exception as error:
            self._reject(handle, self._services.incident(error))
        await self._has_space.wait()

    def _start(self, handle: int, command: pb.SubmitCommand, arrival: float) -> None:
        if self._drain_error is not None:
            raise self._drain_error
        try:
            self._check_access()
        except LineclearError as error:
            self.drain(error)
            raise
        bounds = self._services.model.require()
        if len(self._live) >= MAX_REQUESTS:
            raise QueueFull(
                f"the session has {len(self._live)} requests in progress, the limit is "
                f"{MAX_REQUESTS}; wait for one of them, or open another Session",
                retry_after_seconds=1.0,
                metadata={"limit": str(MAX_REQUESTS)},
            )
        seconds = validation.seconds(command.timeout, "timeout") if command.HasField("timeout") else None
        tenant = identity.tenant_of_request(self._caller, command.tenant, self._tenant)
        request = self._admission.admit(command.request, Call(bounds, self._caller, tenant, arrival, seconds))
        if self._deadline is not None:
            request.deadline = min(request.deadline, self._deadline)
        self._live[handle] = request
        for output in request.outputs:
            output.subscribe(partial(self._on_output, handle, request, output))
        if request.validated.is_prepared:
            _run_at_once(self._submit(request, command.request))
            return
        task = asyncio.ensure_future(self._submit_text(request, command.request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit_text(self, request: RequestContext, message: pb.GenerateRequest) -> None:
        identity.set_flow_tenant(request.call.tenant)
        await self._submit(request, message)

    async def _submit(self, request: RequestContext, message: pb.GenerateRequest) -> None:
        try:
            await request.submit(message)
        except LineclearError as error:
            request.cancel(error)
        except Exception as error:
            request.cancel(self._services.incident(error))

    def _reject(self, handle: int, error: LineclearError) -> None:
        self._services.stats.add_rejected(error.reason)
        self._failures.append((handle, error))
        if len(self._failures) >= _MAX_UNSENT_FAILURES:  # process no command before the client reads
            self._has_space.clear()
        self._wakeup.set()

    async def next_response(self) -> pb.SessionResponse | None:
        """Wait for output of any request and return it; None at the end of the session.

        Raises the error of the session itself.
        """
        while not (self._ready or self._failures):
            if self._stream_error is not None:
                raise self._stream_error
            if not self._live and self._drain_error is not None:
                raise self._drain_error
            if not self._live and self._input_closed:
                return None
            self._wakeup.clear()
            await self._wakeup.wait()
        return self._collect()

    def _on_output(self, handle: int, request: RequestContext, output: OutputStream) -> None:
        self._ready.append((handle, request, output))
        self._wakeup.set()

    def _collect(self) -> pb.SessionResponse:
        """Gather about MAX_PIECE_BYTES of output, oldest first. The rest stays in `_ready`."""
        ready, self._ready = self._ready, []
        columns, events = _Columns(), list[pb.SessionEvent]()
        bytes_left = MAX_PIECE_BYTES
        for i, (handle, request, output) in enumerate(ready):
            if output.has_only_tokens:
                chunk = output.read_nowait(bytes_left)
                bytes_left -= columns.add(handle, output.index, chunk, wants_text=request.validated.wants_text)
            else:
                bytes_left -= self._read_events(handle, request, output, bytes_left, events)
            is_cut = output.is_notified and not output.is_read
            if is_cut or bytes_left <= 0:
                self._ready = ready[i if is_cut else i + 1 :] + self._ready
                break
        for handle, error in self._failures:
            events.append(pb.SessionEvent(handle=handle, error=to_status(error)))
        self._failures.clear()
        self._has_space.set()
        return columns.response(events)

    def _read_events(
        self, handle: int, request: RequestContext, output: OutputStream, max_bytes: int, events: list[pb.SessionEvent]
    ) -> int:
        """Append output that does not fit the columns, mostly a start or an end. Return its bytes."""
        num_bytes = 0
        for response, _, error in read_output(request, output, max_bytes):
            if error is not None:
                event = pb.SessionEvent(handle=handle, error=to_status(error))
            else:
                event = pb.SessionEvent(handle=handle, response=response)
            events.append(event)
            num_bytes += event.ByteSize()
        if request.is_closed:
            del self._live[handle]
        return num_bytes


class _Columns:
    """The tokens of a response, one entry of each column for each."""

    def __init__(self) -> None:
        self._handles: list[int] = []
        self._indexes: list[int] = []
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._outputs: list[int] = []  # shorter, or empty, if the last tokens are of first outputs

    def add(self, handle: int, index: int, chunk: OutputChunk, *, wants_text: bool) -> int:
        """Append the tokens of the output `index`. Return their bytes."""
        tokens = chunk.token_ids
        count = len(tokens)
        if index:
            self._outputs += [0] * (len(self._handles) - len(self._outputs)) + [index] * count
        if count == 1:
            text = chunk.texts[0] if wants_text else ""
            self._handles.append(handle)
            self._indexes.append(chunk.first_index)
            self._token_ids.append(tokens[0])
            self._texts.append(text)
            return TOKEN_BYTES + CHARACTER_BYTES * len(text)
        self._handles += [handle] * count
        self._indexes += range(chunk.first_index, chunk.first_index + count)
        self._token_ids += tokens
        self._texts += chunk.texts if wants_text else [""] * count
        return TOKEN_BYTES * count + CHARACTER_BYTES * sum(map(len, chunk.texts))

    def response(self, events: list[pb.SessionEvent]) -> pb.SessionResponse:
        if self._outputs:
            self._outputs += [0] * (len(self._handles) - len(self._outputs))
        return pb.SessionResponse(
            handles=self._handles,
            indexes=self._indexes,
            token_ids=self._token_ids,
            texts=self._texts if any(self._texts) else (),
            events=events,
            outputs=self._outputs,
        )


def _run_at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that does not wait. A task for it would take as long as its work."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise AssertionError("a coroutine waits that must not")
