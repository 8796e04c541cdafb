"""Many requests of one caller over one call: what is new for any of them leaves in one message.

Decides which rows travel together and when a session is over. A caller that reads slowly gets more in one message, and
holds up nobody: what waits for it is bounded by its mailboxes and by the number of its requests. Knows nothing of
gRPC; how a request is let in is `admission`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial

from lineclear.api_limits import (
    MAX_PIECE_BYTES,
    MAX_SESSION_COMMANDS,
    REQUEST_BYTES_KEY,
)
from lineclear.errors import Cancelled, InvalidRequest, LineclearError, QueueFull
from lineclear.grpc_status import to_status
from lineclear.scheduler.requests import responses, validation
from lineclear.scheduler.requests.admission import Admission, RequestContext, outcome_of
from lineclear.scheduler.requests.output_stream import CHARACTER_BYTES, TOKEN_BYTES
from lineclear.scheduler.requests.validation import ModelBounds
from lineclear.scheduler.security.identity import Identity
from lineclear.v1 import inference_pb2 as pb

_MAX_UNSENT_FAILURES = 256


def session_headers(max_request_bytes: int) -> list[tuple[str, str]]:
    """Return the initial metadata of a session: the largest request in bytes."""
    return [(REQUEST_BYTES_KEY, str(max_request_bytes))]


class Session:
    """One caller's requests. `run` handles the commands, `next_response` has the answers; on one event loop.

    `require` returns what requests are held to, or raises what all are refused with. `incident` makes an error of a
    bug. `deadline` is the call's own, on `clock`; None where it has none.
    """

    def __init__(
        self,
        admission: Admission,
        caller: Identity,
        tenant: str,
        require: Callable[[], ModelBounds],
        incident: Callable[[BaseException], LineclearError],
        clock: Callable[[], float],
        *,
        deadline: float | None,
        max_requests: int,
    ) -> None:
        self._admission = admission
        self._caller = caller
        self._tenant = tenant
        self._require = require
        self._incident = incident
        self._clock = clock
        self._deadline = deadline
        self._max_requests = max_requests
        self._live: dict[int, RequestContext] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: list[tuple[int, RequestContext]] = []
        self._failures: list[tuple[int, LineclearError]] = []
        self._has_space = asyncio.Event()
        self._has_space.set()
        self._wakeup = asyncio.Event()
        self._input_closed = False  # the client sends no more commands
        self._leaving: LineclearError | None = None  # what the session ends with once it is idle
        self._broken: LineclearError | None = None  # what it ends with at once

    def __len__(self) -> int:
        return len(self._live)

    # --- the client's commands ---------------------------------------------------------------------------------------

    async def run(self, messages: AsyncIterator[pb.SessionRequest]) -> None:
        """Obey until the caller ends its side. What is wrong with the stream itself ends the session."""
        try:
            async for message in messages:
                await self._handle(message)
        except LineclearError as error:
            self._broken = error
        except Exception as error:
            self._broken = self._incident(error)
        self._input_closed = True
        self._wakeup.set()

    def drain(self, error: LineclearError) -> None:
        """Take no more requests; when those in progress are over, the session ends with `error`."""
        self._leaving = self._leaving or error
        self._wakeup.set()

    def close(self) -> None:
        """The caller is gone: so are its requests."""
        for task in self._tasks:
            task.cancel()
        for ticket in self._live.values():
            self._admission.close(ticket, "cancelled")
        self._live.clear()

    async def _handle(self, message: pb.SessionRequest) -> None:
        count = len(message.submits) + len(message.cancels)
        if not 1 <= count <= MAX_SESSION_COMMANDS:
            raise InvalidRequest.at("submits", f"{count} commands; send 1 to {MAX_SESSION_COMMANDS} in a message")
        for index, command in enumerate(message.submits):
            await self._admit(f"submits[{index}].handle", command)
        for cancel in message.cancels:
            self._cancel(cancel.handle)

    async def _admit(self, field: str, command: pb.SubmitCommand) -> None:
        handle = command.handle
        await self._admission.pace(command.request)
        if handle in self._live:
            # Not an error event of the handle: that would end the request that has it.
            raise InvalidRequest.at(field, "is that of another live request")
        try:
            self._start(handle, command)
        except LineclearError as error:
            self._refuse(handle, error)
        except Exception as error:
            self._refuse(handle, self._incident(error))
        await self._has_space.wait()

    def _cancel(self, handle: int) -> None:
        ticket = self._live.get(handle)
        if ticket is not None:
            ticket.output.fail(Cancelled("the caller cancelled the request"))

    def _start(self, handle: int, command: pb.SubmitCommand) -> None:
        if self._leaving is not None:
            raise self._leaving
        bounds = self._require()
        if len(self._live) >= self._max_requests:
            raise QueueFull(
                f"the session has {len(self._live)} requests in progress, the server's --max-session-requests is "
                f"{self._max_requests}; wait for one of them, or open another Session",
                retry_after_seconds=1.0,
                metadata={"limit": str(self._max_requests)},
            )
        seconds = validation.seconds(command.timeout, "timeout") if command.HasField("timeout") else None
        ticket = self._admission.open(command.request, bounds, self._caller, self._tenant, seconds)
        if self._deadline is not None:
            ticket.deadline = min(ticket.deadline, self._deadline)
        self._live[handle] = ticket
        ticket.output.subscribe(partial(self._on_output, handle, ticket))
        task = asyncio.ensure_future(self._submit(ticket, command.request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, ticket: RequestContext, message: pb.GenerateRequest) -> None:
        try:
            await self._admission.submit(ticket, message)
        except LineclearError as error:
            ticket.output.fail(error)
        except Exception as error:
            ticket.output.fail(self._incident(error))

    def _refuse(self, handle: int, error: LineclearError) -> None:
        self._admission.count_rejected(error.reason)
        self._failures.append((handle, error))
        if len(self._failures) >= _MAX_UNSENT_FAILURES:  # one who does not read his refusals is not listened to
            self._has_space.clear()
        self._wakeup.set()

    # --- the answers -------------------------------------------------------------------------------------------------

    async def next_response(self) -> pb.SessionResponse | None:
        """All that is new for any request, as soon as there is something; None when the session is over.

        Raises what the session itself ended with.
        """
        while not (self._news or self._failures):
            if self._broken is not None:
                raise self._broken
            if not self._live and self._leaving is not None:
                raise self._leaving
            if not self._live and self._input_closed:
                return None
            self._wakeup.clear()
            await self._wakeup.wait()
        return self._collect()

    def _on_output(self, handle: int, ticket: RequestContext) -> None:
        self._news.append((handle, ticket))
        self._wakeup.set()

    def _collect(self) -> pb.SessionResponse:
        """Gather about MAX_PIECE_BYTES of what is new. What does not fit stays in `_news`, the oldest first."""
        news, self._news = self._news, []
        handles: list[int] = []
        indexes: list[int] = []
        token_ids: list[int] = []
        texts: list[str] = []
        events: list[pb.SessionEvent] = []
        room = MAX_PIECE_BYTES
        for place, (handle, ticket) in enumerate(news):
            plain = ticket.output.read_tokens_only(room)
            if plain is None:
                for event in self._events(handle, ticket, room):
                    events.append(event)
                    room -= event.ByteSize()
            else:
                first_index, tokens, parts = plain
                wants_text = ticket.checked.wants_text
                if len(tokens) == 1:
                    handles.append(handle)
                    indexes.append(first_index)
                    token_ids.append(tokens[0])
                    texts.append(parts[0] if wants_text else "")
                    room -= TOKEN_BYTES + CHARACTER_BYTES * len(texts[-1])
                else:
                    count = len(tokens)
                    handles += [handle] * count
                    indexes += range(first_index, first_index + count)
                    token_ids += tokens
                    texts += parts if wants_text else [""] * count
                    room -= TOKEN_BYTES * count + CHARACTER_BYTES * sum(map(len, parts))
            is_cut = ticket.output.is_announced and handle in self._live
            if is_cut or room <= 0:
                self._news = news[place if is_cut else place + 1 :]
                break
        for handle, error in self._failures:
            events.append(pb.SessionEvent(handle=handle, error=to_status(error)))
        self._failures.clear()
        self._has_space.set()
        return pb.SessionResponse(
            handles=handles,
            indexes=indexes,
            token_ids=token_ids,
            texts=texts if any(texts) else (),
            events=events,
        )

    def _events(self, handle: int, ticket: RequestContext, room: int) -> Iterator[pb.SessionEvent]:
        """Yield what has no place in the columns, up to about `room` bytes: mostly a beginning or an end."""
        while ticket.output.has_output and room > 0:
            try:
                delivery = ticket.output.read_nowait(room)
                spent = None if delivery.end is None else self._admission.spent(ticket, delivery.end)
                event = pb.SessionEvent(handle=handle, response=responses.response(delivery, ticket, spent))
            except Exception as error:  # a bug, too, ends the one request and not the session
                failure = error if isinstance(error, LineclearError) else self._incident(error)
                self._close_request(handle, outcome_of(failure))
                yield pb.SessionEvent(handle=handle, error=to_status(failure))
                return
            room -= event.ByteSize()
            yield event
            if delivery.end is not None:
                self._close_request(handle, delivery.end.reason.name.lower())
                return

    def _close_request(self, handle: int, outcome: str) -> None:
        self._admission.close(self._live.pop(handle), outcome)
