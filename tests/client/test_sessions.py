"""A call of a session that goes on as a call of its own, because the server has no Session."""

from __future__ import annotations

from typing import Any

import pytest

from lineclear.client.session import AioSessionCall, SessionCall
from lineclear.errors import Cancelled, Unsupported
from lineclear.v1 import inference_pb2 as pb


class Missing:
    """The session of a server that has none."""

    refusal = Unsupported("no Session here")

    def order(self, order: pb.SubmitCommand | pb.CancelCommand) -> None:
        pass

    def forget(self, handle: int) -> None:
        pass


class Other:
    """The call in its place, which ends when it is cancelled and never otherwise."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def __next__(self) -> Any:
        assert self.is_cancelled, "it would be waited for without end"
        raise Cancelled("the call was cancelled")

    async def __anext__(self) -> Any:
        return next(self)


def test_a_cancellation_between_the_two_calls_is_not_lost() -> None:
    def instead(seconds: float | None) -> Other:
        call.cancel()  # from another thread, at the worst moment
        return Other()

    session: Any = Missing()
    call = SessionCall(session, 1, None, instead)
    call.put(session.refusal)
    with pytest.raises(Cancelled):
        next(call)


async def test_nor_is_one_with_asyncio() -> None:
    session: Any = Missing()
    call = AioSessionCall(session, 1, None, lambda seconds: Other())
    call.put(session.refusal)
    call.cancel()  # its reader has not been woken yet
    with pytest.raises(Cancelled):
        await call.__anext__()
