"""A client of a Session that sorts received messages by handle."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from support.serving import BOUND_SECONDS, Serving, text_request

from lineclear.errors import LineclearError
from lineclear.status_codec import from_status
from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def command(handle: int, request: pb.GenerateRequest | None = None, seconds: float | None = None) -> pb.SubmitCommand:
    found = pb.SubmitCommand(handle=handle, request=request or text_request())
    if seconds is not None:
        found.timeout.CopyFrom(Duration(seconds=round(seconds)))
    return found


def submit(handle: int, request: pb.GenerateRequest | None = None, seconds: float | None = None) -> pb.SessionRequest:
    return pb.SessionRequest(submits=[command(handle, request, seconds)])


def cancel(handle: int) -> pb.SessionRequest:
    return pb.SessionRequest(cancels=[pb.CancelCommand(handle=handle)])


class Caller:
    """Send commands, and collect tokens, text and errors by handle."""

    def __init__(self, s: Serving, channel: Any = None, **options: Any) -> None:
        self.call = inference_pb2_grpc.InferenceServiceStub(channel or s.channel).Session(**options)
        self.messages: list[pb.SessionResponse] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.started: dict[int, pb.Started] = {}
        self.finished: dict[int, pb.Finished] = {}
        self.failed: dict[int, LineclearError] = {}

    async def send(self, *messages: pb.SessionRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def read(self) -> bool:
        """Read one message; return False at the end of the session."""
        async with asyncio.timeout(BOUND_SECONDS):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.messages.append(message)
        assert len(message.handles) == len(message.indexes) == len(message.token_ids)
        assert {len(message.texts), len(message.outputs)} <= {0, len(message.handles)}
        assert not set(message.handles) & {event.handle for event in message.events}, (
            "rows and an event for one request"
        )
        for row, handle in enumerate(message.handles):
            assert message.indexes[row] == len(self.tokens[handle])
            self.tokens[handle].append(message.token_ids[row])
            self.text[handle] += message.texts[row] if message.texts else ""
        for event in message.events:
            self._on_event(event.handle, event)
        return True

    def _on_event(self, handle: int, event: pb.SessionEvent) -> None:
        assert handle not in self.finished
        assert handle not in self.failed
        if event.HasField("error"):
            self.failed[handle] = from_status(event.error)
            return
        assert event.response.first_index == len(self.tokens[handle])
        self.tokens[handle] += event.response.token_ids
        self.text[handle] += event.response.text
        if event.response.HasField("started"):
            self.started[handle] = event.response.started
        if event.response.HasField("finished"):
            self.finished[handle] = event.response.finished

    async def until(self, condition: Any) -> None:
        while not condition():
            assert await self.read(), "the session ended"

    async def to_the_end(self) -> None:
        while await self.read():
            pass
