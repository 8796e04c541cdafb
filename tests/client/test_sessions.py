"""Requests that share a Session: its messages, when a request is a direct call, and a server without room for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from client.conftest import finished, started
from support.time_limits import PATIENCE_SECONDS

from lineclear.api_limits import MAX_GATHERED_BYTES, REQUEST_BYTES_KEY
from lineclear.client import Client
from lineclear.client._sync.session import Session
from lineclear.client._sync.transport import SessionMultiplexer
from lineclear.client.session_messages import Command, Outbox, SessionRefused, max_request_bytes
from lineclear.errors import Cancelled, LineclearError, QueueFull, RequestTooLarge
from lineclear.v1 import inference_pb2 as pb


def submit(handle: int, num_bytes: int = 1) -> Command:
    return pb.SubmitCommand(handle=handle, request=pb.GenerateRequest(text="x" * num_bytes))


def sent(*commands: Command, max_bytes: int | None = None) -> list[pb.SessionRequest]:
    outbox = Outbox()
    for command in commands:
        outbox.put(command)
    if max_bytes is not None:
        outbox.limit_bytes(max_bytes)
    return list(iter(outbox.take, None))


def test_gathered_commands_share_a_message() -> None:
    (message,) = sent(submit(1), pb.CancelCommand(handle=1), submit(2))
    assert [command.handle for command in message.submits] == [1, 2]
    assert [command.handle for command in message.cancels] == [1]


HALF = MAX_GATHERED_BYTES // 2


@pytest.mark.parametrize(
    ("commands", "max_bytes", "handles"),
    [
        ([submit(n) for n in range(70)], None, [[*range(32)], [*range(32, 64)], [*range(64, 70)]]),
        ([submit(1), submit(2, 10 * HALF), submit(3, HALF - 100), submit(4, HALF - 100)], None, [[1], [2], [3, 4]]),
        ([submit(n, 100) for n in range(4)], 500, [[0, 1], [2, 3]]),
    ],
    ids=["at most 32 commands", "a large command alone", "below the limit of the server"],
)
def test_messages_are_limited(commands: list[Command], max_bytes: int | None, handles: list[list[int]]) -> None:
    found = sent(*commands, max_bytes=max_bytes)
    assert [[command.handle for command in message.submits] for message in found] == handles


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, None),
        ((), None),
        (((REQUEST_BYTES_KEY, "800"),), 800),
        ((("x", "9"), (REQUEST_BYTES_KEY, "many")), None),
        (((REQUEST_BYTES_KEY, b"8"),), None),
    ],
)
def test_max_request_bytes_from_headers(headers: Any, expected: int | None) -> None:
    assert max_request_bytes(headers) == expected


class FakeGrpcCall:
    """The call of a Session, whose server takes requests of 1000 bytes. The stream ends when it is cancelled."""

    def __init__(self) -> None:
        self._is_cancelled = threading.Event()

    def initial_metadata(self) -> Any:
        return ((REQUEST_BYTES_KEY, "1000"),)

    def cancel(self) -> None:
        self._is_cancelled.set()

    def __iter__(self) -> Iterator[Any]:
        assert self._is_cancelled.wait(PATIENCE_SECONDS)
        yield from ()


def test_a_session_rejects_a_request_above_the_limit() -> None:
    """gRPC would end the stream with all its requests."""
    opened: list[Iterator[pb.SessionRequest]] = []

    def open_call(messages: Iterator[pb.SessionRequest]) -> FakeGrpcCall:
        opened.append(messages)
        return FakeGrpcCall()

    session = Session("nowhere", open_call, lambda error: Cancelled(str(error)))
    session.start(pb.GenerateRequest(text="x"), None, lambda: None)
    assert next(opened[0]).submits
    with pytest.raises(RequestTooLarge, match="has 20"):
        session.start(pb.GenerateRequest(text="x" * 2000), None, lambda: None)
    assert session.start(pb.GenerateRequest(text="x" * 600), None, lambda: "direct") == "direct"
    session.close()


# --- the multiplexer: when a request shares the Session and when it is a direct call ---


REQUEST = pb.GenerateRequest(text="a")


class FakeSession:
    is_over = False
    is_closing = False
    refusal: LineclearError | None = None

    def start(
        self, request: pb.GenerateRequest, seconds: float | None, make_direct_call: Callable[[], Any], tenant: str
    ) -> str:
        assert (request, seconds) == (REQUEST, 3.0)
        return f"shared {tenant}".strip()


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.opened: list[FakeSession] = []
        self.multiplexer = SessionMultiplexer(True, self._open, lambda: self.now)

    def _open(self, metadata: Any) -> Any:
        self.opened.append(FakeSession())
        return self.opened[-1]

    def start(self, metadata: Any = ()) -> str:
        found = self.multiplexer.start(REQUEST, 3.0, metadata, lambda: "direct")
        assert isinstance(found, str)
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_a_single_call_is_direct(world: World) -> None:
    assert world.start() == "direct"
    world.multiplexer.on_end()
    assert world.start() == "direct"
    assert world.multiplexer.session is None


def test_tenants_share_one_session(world: World) -> None:
    tenants = [(("x-tenant-id", name), ("a", "b")) for name in "abc"]
    assert [world.start(metadata) for metadata in tenants] == ["direct", "shared b", "shared c"]
    assert world.start((("a", "b"),)) == "shared"
    assert len(world.opened) == 1


@pytest.mark.parametrize("state", ["is_over", "is_closing"])
def test_an_ended_session_is_replaced(world: World, state: str) -> None:
    world.start(), world.start()
    setattr(world.opened[-1], state, True)
    assert world.start() == "shared"
    assert len(world.opened) == 2


@pytest.mark.parametrize(("retry_after_seconds", "seconds"), [(30.0, 30.0), (None, 10.0), (1.0, 10.0)])
def test_a_refused_session_is_opened_again_later(
    world: World, retry_after_seconds: float | None, seconds: float
) -> None:
    world.start(), world.start()
    refused = world.opened[-1]
    refused.is_over, refused.refusal = True, QueueFull("64 are open", retry_after_seconds=retry_after_seconds)
    for world.now, expected in ((1.0, "direct"), (seconds, "direct"), (1.0 + seconds, "shared")):
        assert world.start() == expected
    assert len(world.opened) == 2


def test_a_call_that_fails_to_start_is_not_counted(world: World) -> None:
    def impossible() -> str:
        raise ValueError("invalid metadata")

    with pytest.raises(ValueError, match="invalid metadata"):
        world.multiplexer.start(REQUEST, None, (), impossible)
    assert world.start() == "direct"


# --- a server without room for a Session answers its requests all the same, each as a direct call ---


def test_a_refused_session_uses_up_no_attempt(server: Any, client: Any) -> None:
    """`client` makes one attempt of each call."""
    gate = threading.Barrier(8)
    opened = []

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        opened.append(None)
        server.fail(context, QueueFull("too many sessions", retry_after_seconds=1.0))
        yield

    server.session = session
    server.play([lambda _: gate.wait(PATIENCE_SECONDS), finished(0)])
    assert [found.finish_reason for found in client.generate_batch(["x"] * 8)] == ["length"] * 8
    assert len(opened) == 1


def test_a_session_that_failed_after_a_response_is_not_refused(server: Any) -> None:
    """The request may have run: only the retry policy sends it again."""
    was_read = threading.Event()

    def session(orders: Any, context: grpc.ServicerContext) -> Iterator[pb.SessionResponse]:
        context.send_initial_metadata(())
        handle = next(orders).submits[0].handle
        yield pb.SessionResponse(events=[pb.SessionEvent(handle=handle, response=started())])
        was_read.set()
        server.fail(context, QueueFull("no more"))

    server.session = session
    server.play([started(), lambda _: was_read.wait(PATIENCE_SECONDS), finished(0)])
    with Client(server.target) as client:
        first, second = client.generate_batch(["x", "x"], return_exceptions=True)
    assert {type(first).__name__, type(second).__name__} == {"Generation", "QueueFull"}


class RefusedThenDirect:
    """A transport whose first call ends with SessionRefused. The second starts while `cancel` is called."""

    target = "unix:fake"
    cancel = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.calls: list[FakeCall] = []

    def stream(self, *_: Any, **__: Any) -> Any:
        if self.calls:
            self.cancel()
        self.calls.append(FakeCall(is_refused=not self.calls))
        return self.calls[-1]


class FakeCall:
    """A call that ends once it is cancelled."""

    def __init__(self, is_refused: bool) -> None:
        self.is_refused = is_refused
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __next__(self) -> Any:
        if self.is_refused:
            raise SessionRefused
        assert self.is_cancelled, "it would never end"
        raise Cancelled("the call was cancelled")


def test_a_cancellation_between_the_two_calls_is_kept() -> None:
    transport: Any = RefusedThenDirect()
    with Client(transport=transport).stream("x") as stream:
        transport.cancel = stream.cancel
        with pytest.raises(Cancelled):
            next(stream)
