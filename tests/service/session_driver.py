"""One who gives orders over a Session and reads what comes, sorted by handle."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from service.serving import (
    BOUND_SECONDS,
    Serving,
    text_request,
)

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc


def submit(handle: int, request: pb.GenerateRequest | None = None, seconds: float | None = None) -> pb.SessionRequest:
    order = pb.SessionSubmit(handle=handle, request=request or text_request())
    if seconds is not None:
        order.timeout.CopyFrom(Duration(seconds=round(seconds)))
    return pb.SessionRequest(submit=order)


def cancel(handle: int) -> pb.SessionRequest:
    return pb.SessionRequest(cancel=pb.SessionCancel(handle=handle))


class Caller:
    """One who reads a session, and sorts what comes by handle."""

    def __init__(self, s: Serving, channel: Any = None, **options: Any) -> None:
        self.call = inference_pb2_grpc.InferenceServiceStub(channel or s.channel).Session(**options)
        self.messages: list[pb.SessionResponse] = []
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.text: dict[int, str] = defaultdict(str)
        self.started: dict[int, pb.Started] = {}
        self.finished: dict[int, pb.Finished] = {}
        self.failed: dict[int, pb.Failure] = {}

    async def order(self, *orders: pb.SessionRequest) -> None:
        for order in orders:
            await self.call.write(order)

    async def read(self) -> bool:
        """One message; False at the end of the session."""
        async with asyncio.timeout(BOUND_SECONDS):
            message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        self.messages.append(message)
        assert len(message.handles) == len(message.indexes) == len(message.token_ids)
        assert len(message.texts) in (0, len(message.handles))
        assert not set(message.handles) & {piece.handle for piece in message.pieces}, "rows and a piece for one request"
        for row, handle in enumerate(message.handles):
            assert message.indexes[row] == len(self.tokens[handle])
            self.tokens[handle].append(message.token_ids[row])
            self.text[handle] += message.texts[row] if message.texts else ""
        for piece in message.pieces:
            self._piece(piece.handle, piece)
        return True

    def _piece(self, handle: int, piece: pb.SessionPiece) -> None:
        assert handle not in self.finished
        assert handle not in self.failed
        if piece.HasField("failure"):
            self.failed[handle] = piece.failure
            return
        assert piece.response.first_index == len(self.tokens[handle])
        self.tokens[handle] += piece.response.token_ids
        self.text[handle] += piece.response.text
        if piece.response.HasField("started"):
            self.started[handle] = piece.response.started
        if piece.response.HasField("finished"):
            self.finished[handle] = piece.response.finished

    async def until(self, condition: Any) -> None:
        while not condition():
            assert await self.read(), "the session ended"

    async def to_the_end(self) -> None:
        while await self.read():
            pass
