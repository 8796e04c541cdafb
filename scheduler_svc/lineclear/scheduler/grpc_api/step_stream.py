"""The handler of WatchSteps: what a watcher has missed goes into each response, at its own pace."""

from __future__ import annotations

import asyncio
from typing import Any, TypeAlias

import grpc.aio

from lineclear.errors import InvalidRequest, TooManyWatchers, Unauthenticated
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter
from lineclear.scheduler.grpc_api.step_messages import StepMessages, state_message
from lineclear.scheduler.security import identity
from lineclear.scheduler.steps.scheduler_state import SchedulerState
from lineclear.scheduler.steps.step_feed import StepFeed, StepWatcher
from lineclear.v1 import steps_pb2 as pb

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_DEFAULT_SECONDS, _MIN_SECONDS, _MAX_SECONDS = 0.1, 0.02, 10.0
_CLOSE_SECONDS = 0.25  # until a watcher finds out that the server stops
_STATE_SECONDS = 1.0  # for the engine to take a state


class StepStream:
    """Streams steps to the callers of WatchSteps, on one event loop."""

    def __init__(self, steps: StepFeed, history_size: int, stall_timeout_seconds: float) -> None:
        self._steps = steps
        self._messages = StepMessages(history_size)
        self._stall_timeout_seconds = stall_timeout_seconds

    async def serve(self, request: pb.WatchStepsRequest, context: Context) -> None:
        """Write responses until the server stops. Raises TooManyWatchers, SlowConsumer or Unauthenticated."""
        seconds = _interval(request)
        is_valid, is_in_time = identity.validity(), identity.certificate_validity(context)
        sent: SchedulerState | None = None
        async with ResponseWriter(context, self._stall_timeout_seconds) as writer:
            with self._steps.watch(request.history) as watcher:
                while not self._steps.is_closed:
                    if not (is_valid() and is_in_time()):
                        raise Unauthenticated("the token or certificate of this call is no longer valid")
                    if watcher.is_replaced:
                        raise TooManyWatchers(
                            "a newer call has the place of this one; raise --max-step-watchers, or call again"
                        )
                    response = self._read(watcher)
                    if request.include_state or request.include_block_map:
                        state = await self._state()
                        if state is not None and not state.equals(sent):
                            response.state.CopyFrom(state_message(state, with_block_map=request.include_block_map))
                            sent = state
                    if response.steps or response.skipped or response.HasField("state"):
                        await writer.write(response)
                    if not watcher.has_more or len(response.steps) == 0:
                        await self._pause(seconds)

    def _read(self, watcher: StepWatcher) -> pb.WatchStepsResponse:
        found = watcher.read()
        offset = self._steps.wall_offset
        steps = [self._messages.of(step, offset) for step in found.steps]
        return pb.WatchStepsResponse(steps=steps, skipped=found.skipped)

    async def _state(self) -> SchedulerState | None:
        """Return the state, or None while the engine is too busy to take it."""
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                return await asyncio.shield(asyncio.wrap_future(self._steps.state()))
        except TimeoutError:
            return None

    async def _pause(self, seconds: float) -> None:
        while seconds > 0 and not self._steps.is_closed:
            await asyncio.sleep(min(seconds, _CLOSE_SECONDS))
            seconds -= _CLOSE_SECONDS


def _interval(request: pb.WatchStepsRequest) -> float:
    if not request.HasField("min_interval"):
        return _DEFAULT_SECONDS
    seconds = request.min_interval.ToNanoseconds() / 1e9
    if seconds < 0:
        raise InvalidRequest.at("min_interval", "must not be negative")
    return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
