"""SessionMultiplexer: when a request shares the Session and when it is a direct call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lineclear.client._sync.transport import SessionMultiplexer
from lineclear.errors import LineclearError, QueueFull
from lineclear.v1 import inference_pb2 as pb

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
    """A multiplexer, its sessions and its clock."""

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


def test_concurrent_calls_share_one_session(world: World) -> None:
    assert [world.start() for _ in range(3)] == ["direct", "shared", "shared"]
    assert world.opened == [world.multiplexer.session]


def test_tenants_share_one_session(world: World) -> None:
    tenants = [(("x-tenant-id", name), ("a", "b")) for name in "abc"]
    assert [world.start(metadata) for metadata in tenants] == ["direct", "shared b", "shared c"]
    assert world.start((("a", "b"),)) == "shared"
    assert len(world.opened) == 1


def test_a_call_with_other_metadata_is_direct(world: World) -> None:
    first, second = (("tenant", "a"),), (("tenant", "b"),)
    assert [world.start(metadata) for metadata in (first, first, second)] == ["direct", "shared", "direct"]


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
