"""Through what a call goes: alone where it is the only one, else through a session for all who say the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lineclear.client.session_multiplexer import SessionMultiplexer
from lineclear.errors import LineclearError, QueueFull, Unsupported
from lineclear.v1 import inference_pb2 as pb

REQUEST = pb.GenerateRequest(text="a")


class FakeSession:
    is_over = False
    is_closing = False
    is_missing = False
    refusal: LineclearError | None = None

    def begin(self, request: pb.GenerateRequest, seconds: float | None, alone: Callable[[float | None], Any]) -> str:
        assert request is REQUEST
        return f"shared, {seconds} s"


class Sessions:
    """Opens them, and keeps count."""

    def __init__(self) -> None:
        self.opened: list[FakeSession] = []

    def open(self, metadata: Any) -> FakeSession:
        self.opened.append(FakeSession())
        return self.opened[-1]


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


@pytest.fixture
def crowd(sessions: Sessions) -> SessionMultiplexer[FakeSession]:
    return SessionMultiplexer(True, sessions.open)


def begin(crowd: SessionMultiplexer[FakeSession], metadata: Any = ()) -> str:
    found = crowd.start(REQUEST, 3.0, metadata, lambda seconds: f"alone, {seconds} s")
    assert isinstance(found, str)
    return found


def test_who_is_alone_has_a_call_of_its_own(crowd: SessionMultiplexer[FakeSession]) -> None:
    assert begin(crowd) == "alone, 3.0 s"
    crowd.leave()
    assert begin(crowd) == "alone, 3.0 s"
    assert crowd.session is None


def test_who_is_not_shares_one_session(crowd: SessionMultiplexer[FakeSession], sessions: Sessions) -> None:
    assert [begin(crowd) for _ in range(3)] == ["alone, 3.0 s", "shared, 3.0 s", "shared, 3.0 s"]
    assert sessions.opened == [crowd.session]


def test_who_says_something_else_has_a_call_of_its_own(crowd: SessionMultiplexer[FakeSession]) -> None:
    ours, others = (("tenant", "a"),), (("tenant", "b"),)
    assert [begin(crowd, says) for says in (ours, ours, others)] == ["alone, 3.0 s", "shared, 3.0 s", "alone, 3.0 s"]


def test_one_that_is_over_is_followed_by_another_if_the_server_has_them(
    crowd: SessionMultiplexer[FakeSession], sessions: Sessions
) -> None:
    begin(crowd), begin(crowd)
    sessions.opened[-1].is_over = True
    assert begin(crowd) == "shared, 3.0 s"
    assert len(sessions.opened) == 2
    sessions.opened[-1].is_over = sessions.opened[-1].is_missing = True
    sessions.opened[-1].refusal = Unsupported("no such method")
    assert begin(crowd) == "alone, 3.0 s"
    assert len(sessions.opened) == 2


def test_one_that_was_refused_is_asked_for_again_later(sessions: Sessions) -> None:
    now = [0.0]
    crowd = SessionMultiplexer(True, sessions.open, lambda: now[0])
    begin(crowd), begin(crowd)
    sessions.opened[-1].is_over, sessions.opened[-1].refusal = True, QueueFull("64 are open", retry_after_seconds=30.0)
    for now[0], expected in ((1.0, "alone, 3.0 s"), (30.0, "alone, 3.0 s"), (31.0, "shared, 3.0 s")):
        assert begin(crowd) == expected
    assert len(sessions.opened) == 2


def test_a_session_that_takes_no_more_requests_is_followed_by_another(
    crowd: SessionMultiplexer[FakeSession], sessions: Sessions
) -> None:
    begin(crowd), begin(crowd)
    sessions.opened[-1].is_closing = True
    assert begin(crowd) == "shared, 3.0 s"
    assert len(sessions.opened) == 2


def test_a_call_that_cannot_be_made_is_not_one_of_the_crowd(crowd: SessionMultiplexer[FakeSession]) -> None:
    """Else every call after it would go through a session, though there is no other."""

    def impossible(seconds: float | None) -> str:
        raise ValueError("metadata that cannot travel")

    with pytest.raises(ValueError, match="cannot travel"):
        crowd.start(REQUEST, None, (), impossible)
    assert begin(crowd) == "alone, 3.0 s"
