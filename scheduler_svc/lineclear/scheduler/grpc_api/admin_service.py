"""lineclear.v1.AdminService. Every call is logged with the caller's name; AdminOperations does the work."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import structlog
from pydantic import Field, TypeAdapter, ValidationError

from lineclear.errors import InvalidRequest, TooManyWatchers, Unauthenticated
from lineclear.process.setting_fields import allowed
from lineclear.scheduler.grpc_api.response_writer import ResponseWriter
from lineclear.scheduler.observe.scheduler_state import TakenState
from lineclear.scheduler.observe.step_feed import StepFeed
from lineclear.scheduler.requests.adapters import LoadedAdapter
from lineclear.scheduler.requests.request_manager import RequestManager
from lineclear.scheduler.requests.validate.violations import Violations
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Context
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import admin_pb2_grpc, steps_pb2
from lineclear.wire.messages import Profiled

log = structlog.get_logger()

_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
NAME: str = _SERVICE.full_name
METHODS = frozenset(f"/{NAME}/{method.name}" for method in _SERVICE.methods)
_DEFAULT_SECONDS, _MIN_SECONDS, _MAX_SECONDS = 0.1, 0.02, 10.0
_CLOSE_SECONDS = 0.25  # until a watcher finds out that the server stops
_STATE_SECONDS = 1.0  # for the engine to take a state

_MAX_PROFILED_STEPS, _MAX_PROFILE_SECONDS = 1000, 60.0
_DEFAULT_PROFILED_STEPS, _DEFAULT_PROFILE_SECONDS = 20, 10.0

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}
_NUMBERS = {name: number for number, name in _LEVELS.items()}


class OperationsApi(Protocol):
    @property
    def steps(self) -> StepFeed:
        """The executed steps."""

    def shut_down(self) -> None:
        """Start a graceful shutdown. No effect if it has started."""

    async def dump_recording(self) -> Path:
        """Write the flight recording. Return its file."""

    async def restart_workers(self) -> list[int]:
        """Restart one worker after the other. Return the new pids."""

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache."""

    async def switch_scheduling(self, settings: SchedulerSettings) -> None:
        """Have the core follow the scheduling settings. Returns when it does."""

    async def profile(self, num_steps: int, worker: int, seconds: float) -> Profiled:
        """Record the next steps of a worker, for at most `seconds`."""

    def set_log_level(self, level: str) -> str:
        """Set the log level of both processes. Return the level before."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The handlers. On one event loop."""

    def __init__(self, manager: RequestManager, operations: OperationsApi) -> None:
        self._manager, self._operations = manager, operations
        self._services = manager.services

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Start a graceful shutdown. Return the remaining requests and time."""
        _log_call("drain", context)
        self._operations.shut_down()
        remaining = self._manager.drain_remaining_seconds
        response = pb.DrainResponse(requests_in_progress=len(self._services.streams))
        # The first call is answered before the drain has started.
        seconds = self._services.settings.drain_timeout_seconds if remaining is None else remaining
        response.time_remaining.FromNanoseconds(round(seconds * 1e9))
        return response

    async def DumpRecording(self, request: pb.DumpRecordingRequest, context: Context) -> pb.DumpRecordingResponse:
        """Write the flight recording to a file on the server."""
        _log_call("dump_recording", context)
        return pb.DumpRecordingResponse(path=str(await self._operations.dump_recording()))

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        _log_call("flush_prefix_cache", context)
        self._operations.flush_prefix_cache()
        return pb.FlushPrefixCacheResponse()

    async def RestartWorkers(self, request: pb.RestartWorkersRequest, context: Context) -> pb.RestartWorkersResponse:
        _log_call("restart_workers", context)
        return pb.RestartWorkersResponse(pids=await self._operations.restart_workers())

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        """Change the log level of both processes."""
        level = _LEVELS.get(request.level)
        if level is None:
            raise InvalidRequest.at("level", f"must be one of {', '.join(_LEVELS.values())}")
        _log_call("set_log_level", context, log_level=level)
        return pb.SetLogLevelResponse(previous=_NUMBERS[self._operations.set_log_level(level)])

    async def WatchSteps(  # type: ignore[override]  # writes to the context instead of returning an iterator
        self, request: steps_pb2.WatchStepsRequest, context: Context
    ) -> None:
        """Stream the executed steps until the server stops."""
        _log_call("watch_steps", context)
        await watch_steps(self._operations.steps, request, context, self._services.settings.stall_timeout_seconds)

    async def GetScheduling(self, request: pb.GetSchedulingRequest, context: Context) -> pb.GetSchedulingResponse:
        return pb.GetSchedulingResponse(scheduling=_in_force(self._services.settings))

    async def UpdateScheduling(
        self, request: pb.UpdateSchedulingRequest, context: Context
    ) -> pb.UpdateSchedulingResponse:
        """Change scheduling settings. Return those in force."""
        changes = {field.name: value for field, value in request.changes.ListFields()}
        hello = self._services.engine.worker_status.hello
        settings = _changed(self._services.settings, changes, None if hello is None else hello.num_slots)
        _log_call("update_scheduling", context, **{name: str(value) for name, value in changes.items()})
        # No await in between: the event loop and the core follow changes in the same order.
        self._services.follow(settings)
        await self._operations.switch_scheduling(settings)
        return pb.UpdateSchedulingResponse(scheduling=_in_force(settings))

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        """Load an adapter on every joined worker."""
        _log_call("load_adapter", context, adapter=request.name)
        return pb.LoadAdapterResponse(adapter=_adapter(await self._services.adapters.load(request.name, request.path)))

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        """Unload an adapter; requests that use it run to their end."""
        _log_call("unload_adapter", context, adapter=request.name)
        return pb.UnloadAdapterResponse(requests_in_progress=await self._services.adapters.unload(request.name))

    async def Profile(self, request: pb.ProfileRequest, context: Context) -> pb.ProfileResponse:
        """Record the next steps of a worker."""
        has_duration = request.HasField("max_duration")
        seconds = request.max_duration.ToNanoseconds() / 1e9 if has_duration else _DEFAULT_PROFILE_SECONDS
        violations = Violations()
        if request.num_steps > _MAX_PROFILED_STEPS:
            violations.add("num_steps", f"must be at most {_MAX_PROFILED_STEPS}")
        if not 0 < seconds <= _MAX_PROFILE_SECONDS:
            violations.add("max_duration", f"must be above 0 and at most {_MAX_PROFILE_SECONDS:g} s")
        violations.raise_if_any()
        _log_call("profile", context)
        num_steps = request.num_steps or _DEFAULT_PROFILED_STEPS
        profiled = await self._operations.profile(num_steps, request.worker, seconds)
        return pb.ProfileResponse(trace=profiled.trace, num_steps=profiled.num_steps)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(_adapter, self._services.adapters.all()))


def _adapter(adapter: LoadedAdapter) -> pb.LoadedAdapter:
    return pb.LoadedAdapter(
        name=adapter.name,
        digest=adapter.files.key.hex(),
        rank=adapter.files.rank,
        path=adapter.path,
        base_model=adapter.files.base_model,
        requests_in_progress=adapter.num_requests,
        warning=adapter.warning,
    )


def _log_call(rpc: str, context: Context, **fields: str) -> None:
    log.warning("admin_call", rpc=rpc, name=identity.caller(context).tenant, **fields)


# --- WatchSteps: what a watcher has missed goes into each response, at its own pace -----------------------------------


async def watch_steps(
    feed: StepFeed, request: steps_pb2.WatchStepsRequest, context: Context, stall_timeout_seconds: float
) -> None:
    """Write responses until the server stops. Raises TooManyWatchers, SlowConsumer or Unauthenticated."""
    seconds = watch_interval(request)
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


def watch_interval(request: steps_pb2.WatchStepsRequest) -> float:
    """Return the seconds between two messages of a call. Raises InvalidRequest."""
    if not request.HasField("min_interval"):
        return _DEFAULT_SECONDS
    seconds = request.min_interval.ToNanoseconds() / 1e9
    if seconds < 0:
        raise InvalidRequest.at("min_interval", "must not be negative")
    return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)


def _changed(settings: SchedulerSettings, changes: Mapping[str, Any], num_slots: int | None) -> SchedulerSettings:
    """Return the settings with `changes`, each within the range of its setting. Raises InvalidRequest.

    `num_slots` are those of the joined worker; None without one.
    """
    violations = Violations()
    for name, value in changes.items():
        try:
            _type_of(name).validate_python(value)
        except ValidationError:
            violations.add(f"changes.{name}", f"must be {allowed(SchedulerSettings.model_fields[name])}")
    if num_slots is not None and changes.get("max_batch_size", 0) > num_slots:
        violations.add("changes.max_batch_size", f"must be at most {num_slots}, the slots of the joined worker")
    violations.raise_if_any()
    found = settings.model_copy(update=dict(changes))
    if found.min_batch_size > found.max_batch_size:
        violations.add("changes.min_batch_size", f"must be at most {found.max_batch_size}, the batch size")
    violations.raise_if_any()
    return found


def _type_of(name: str) -> TypeAdapter[Any]:
    field = SchedulerSettings.model_fields[name]
    kind: Any = Annotated[field.annotation, Field(), *field.metadata]
    return TypeAdapter(kind)


def _in_force(settings: SchedulerSettings) -> pb.Scheduling:
    """Return the values in force. Each field of the message is a setting."""
    return pb.Scheduling(**{field.name: getattr(settings, field.name) for field in pb.Scheduling.DESCRIPTOR.fields})
