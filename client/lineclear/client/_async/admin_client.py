"""The client of the admin RPCs, which a server offers at its admin address only."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import cast, get_args

from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import steps_pb2

from .. import rpc_methods
from ..admin_results import (
    DrainStatus,
    LoadedAdapter,
    LogLevel,
    adapter_of,
    scheduling_values,
    seconds_of,
    update_scheduling_request,
)
from ..message_fields import filled, seconds
from ..parameters import UNSET
from ..retry import MAX_TIMEOUT_SECONDS
from ..step_profile import StepProfile
from .client import AsyncClient


class AsyncAdminClient:
    """Admin commands: `await AsyncAdminClient(AsyncClient(admin_address)).drain()`. Calls raise LineclearError."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def drain(self) -> DrainStatus:
        """Start a graceful shutdown, as SIGTERM does. A repeated call returns the current state."""
        answer = await self._client._unary(rpc_methods.DRAIN, pb.DrainRequest(), UNSET)
        return DrainStatus(answer.requests_in_progress, seconds_of(answer.time_remaining))

    async def dump_recording(self) -> str:
        """Write the flight recording and return the path of the file on the machine of the server."""
        return (await self._client._unary(rpc_methods.DUMP_RECORDING, pb.DumpRecordingRequest(), UNSET)).path

    async def flush_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        await self._client._unary(rpc_methods.FLUSH_PREFIX_CACHE, pb.FlushPrefixCacheRequest(), UNSET)

    async def restart_workers(self, *, timeout_seconds: float | None = None) -> tuple[int, ...]:
        """Restart one worker after the other; return the pids of the new ones when the last has joined.

        No stream ends: the requests of a worker continue on the others. The restart goes on if the call times out.
        """
        answer = await self._client._unary(rpc_methods.RESTART_WORKERS, pb.RestartWorkersRequest(), timeout_seconds)
        return tuple(answer.pids)

    async def set_log_level(self, level: LogLevel) -> LogLevel:
        """Set the log level of the scheduler and return the previous level."""
        if level not in get_args(LogLevel):
            raise InvalidRequest.at("level", f"must be one of {', '.join(get_args(LogLevel))}")
        request = pb.SetLogLevelRequest(level=pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}"))
        previous = (await self._client._unary(rpc_methods.SET_LOG_LEVEL, request, UNSET)).previous
        return cast("LogLevel", pb.LogLevel.Name(previous).removeprefix("LOG_LEVEL_").lower())

    async def scheduling(self) -> dict[str, str | int | float]:
        """Return the scheduling settings in force, by name."""
        answer = await self._client._unary(rpc_methods.GET_SCHEDULING, pb.GetSchedulingRequest(), UNSET)
        return scheduling_values(answer.scheduling)

    async def update_scheduling(self, **changes: str | float) -> dict[str, str | int | float]:
        """Change scheduling settings while the server runs, and return those in force.

        `Scheduling` in admin.proto names them: scheduling_policy="fair", max_queue_size=100. All change, or none.
        """
        request = update_scheduling_request(changes)
        answer = await self._client._unary(rpc_methods.UPDATE_SCHEDULING, request, UNSET)
        return scheduling_values(answer.scheduling)

    async def load_adapter(self, name: str, path: str, *, timeout_seconds: float | None = None) -> LoadedAdapter:
        """Load the LoRA adapter in a folder below the server's `lora_dir`; return when every worker has it."""
        request = filled(pb.LoadAdapterRequest(), name=name, path=path)
        return adapter_of((await self._client._unary(rpc_methods.LOAD_ADAPTER, request, timeout_seconds)).adapter)

    async def unload_adapter(self, name: str) -> int:
        """Unload an adapter. New requests for it fail; return how many still use it and run to their end."""
        request = filled(pb.UnloadAdapterRequest(), name=name)
        return (await self._client._unary(rpc_methods.UNLOAD_ADAPTER, request, UNSET)).requests_in_progress

    async def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the loaded adapters, by name."""
        answer = await self._client._unary(rpc_methods.LIST_ADAPTERS, pb.ListAdaptersRequest(), UNSET)
        return tuple(map(adapter_of, answer.adapters))

    async def profile(self, *, num_steps: int = 20, worker: int = 0, max_seconds: float = 10.0) -> StepProfile:
        """Record what the next steps of a worker spend their time on; return when they have run, or the time is over.

        Steps run while the server has requests. A trace of 3 MB ends the recording early. Recorded steps are slower.
        """
        request = filled(pb.ProfileRequest(), num_steps=num_steps, worker=worker)
        limit = min(max(seconds("max_seconds", max_seconds), 0.0), MAX_TIMEOUT_SECONDS)
        request.max_duration.FromNanoseconds(round(limit * 1e9))
        answer = await self._client._unary(rpc_methods.PROFILE, request, None)
        return StepProfile(answer.trace, answer.num_steps)

    async def watch_steps(
        self,
        *,
        history: int = 0,
        min_interval_seconds: float = 0.1,
        include_state: bool = False,
        include_block_map: bool = False,
    ) -> AsyncGenerator[steps_pb2.WatchStepsResponse, None]:
        """Yield the executed steps of all workers, until the server stops or the loop ends.

        Items are messages of steps.proto; `step_rows` returns the rows of a step. Begins with up to `history` steps
        before the call. At most one item in each interval; a loop that is slower than the server misses steps, which
        `skipped` counts. Items that change the state have it, on request: queue, running requests and workers, with
        `include_block_map` also each KV block. Wrap the generator in `contextlib.aclosing` where the loop may end
        early.
        """
        request = filled(
            steps_pb2.WatchStepsRequest(),
            history=history,
            include_state=include_state,
            include_block_map=include_block_map,
        )
        interval = min(max(seconds("min_interval_seconds", min_interval_seconds), 0.0), MAX_TIMEOUT_SECONDS)
        request.min_interval.FromNanoseconds(round(interval * 1e9))
        metadata = self._client._config.metadata
        call = self._client._transport.stream_async(
            rpc_methods.WATCH_STEPS, request, timeout_seconds=None, metadata=metadata
        )
        try:
            while True:
                yield await call.__anext__()
        except StopAsyncIteration:
            return
        finally:
            call.cancel()
