"""The handler of WatchSteps: what a watcher has missed goes into each response, at its own pace."""

from __future__ import annotations

import asyncio

from lineclear.errors import InvalidRequest, TooManyWatchers, Unauthenticated
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_feed import StepFeed
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Context
from lineclear.v1 import steps_pb2 as pb

_DEFAULT_SECONDS, _MIN_SECONDS, _MAX_SECONDS = 0.1, 0.02, 10.0
_CLOSE_SECONDS = 0.25  # until a watcher finds out that the server stops
_STATE_SECONDS = 1.0  # for the engine to take a state


async def serve(feed: StepFeed, request: pb.WatchStepsRequest, context: Context, stall_timeout_seconds: float) -> None:
    """Write responses until the server stops. Raises TooManyWatchers, SlowConsumer or Unauthenticated."""
    seconds = _interval(request)
    is_valid, is_in_time = identity.validity(), identity.certificate_validity(context)
    with_state = request.include_state or request.include_block_map
    async with ResponseWriter(context, stall_timeout_seconds) as writer:
        with feed.watch(request.history) as watcher:
            while not feed.is_closed:
                if not (is_valid() and is_in_time()):
                    raise Unauthenticated("the token or certificate of this call is no longer valid")
                if watcher.is_replaced:
                    raise TooManyWatchers(
                        "a newer call has the place of this one; raise --max-step-watchers, or call again"
                    )
                state = await _state(feed) if with_state else None
                response = watcher.read(state, block_maps=request.include_block_map)
                if response.ByteSize():
                    await writer.write(response)
                if not watcher.has_more or not response.steps:
                    await _pause(feed, seconds)


async def _state(feed: StepFeed) -> TakenState | None:
    """Return the state, or None while the engine is too busy to take it."""
    try:
        async with asyncio.timeout(_STATE_SECONDS):
            return await asyncio.shield(asyncio.wrap_future(feed.state()))
    except TimeoutError:
        return None


async def _pause(feed: StepFeed, seconds: float) -> None:
    while seconds > 0 and not feed.is_closed:
        await asyncio.sleep(min(seconds, _CLOSE_SECONDS))
        seconds -= _CLOSE_SECONDS


def _interval(request: pb.WatchStepsRequest) -> float:
    if not request.HasField("min_interval"):
        return _DEFAULT_SECONDS
    seconds = request.min_interval.ToNanoseconds() / 1e9
    if seconds < 0:
        raise InvalidRequest.at("min_interval", "must not be negative")
    return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
