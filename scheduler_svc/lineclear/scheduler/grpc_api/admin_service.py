"""lineclear.v1.AdminService: what operators ask of this process, and what they are told.

Decides the answers alone: where it is offered is `server`'s, who is let in the admin listener's, and the doing
`operations`'. Every order is logged with the name of who gave it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeAlias

import grpc.aio
import structlog

from lineclear.errors import InvalidRequest
from lineclear.scheduler.grpc_api.inference_service import InferenceService
from lineclear.scheduler.security import identity
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.v1 import admin_pb2 as pb
from lineclear.v1 import admin_pb2_grpc

log = structlog.get_logger()

_SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"]
NAME: str = _SERVICE.full_name
METHODS = frozenset(f"/{NAME}/{method.name}" for method in _SERVICE.methods)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_LEVELS = {
    pb.LOG_LEVEL_DEBUG: "debug",
    pb.LOG_LEVEL_INFO: "info",
    pb.LOG_LEVEL_WARNING: "warning",
    pb.LOG_LEVEL_ERROR: "error",
}
_NUMBERS = {name: number for number, name in _LEVELS.items()}


class OperationsApi(Protocol):
    """What the service needs of the process."""

    def shut_down(self) -> None:
        """Begin to leave in peace; nothing if that has begun."""
        ...

    async def dump_recording(self) -> Path:
        """Write the flight recorder; the file."""
        ...

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        ...

    def set_log_level(self, level: str) -> str:
        """Log from `level` upwards, in both processes; the level before."""
        ...


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """The handlers. On one event loop."""

    def __init__(self, settings: SchedulerSettings, service: InferenceService) -> None:
        self._settings, self._service = settings, service

    def attach(self, operations: OperationsApi) -> None:
        """Begin to use the process. Once, before the first call."""
        self._operations = operations

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Begin to leave, and say what remains."""
        _log_call("drain", context)
        self._operations.shut_down()
        remaining = self._service.drain_remaining_seconds
        response = pb.DrainResponse(requests_in_progress=len(self._service.streams))
        # The first who asks is answered before the drain has begun.
        seconds = self._settings.drain_timeout_seconds if remaining is None else remaining
        response.time_remaining.FromNanoseconds(round(seconds * 1e9))
        return response

    async def DumpRecording(self, request: pb.DumpRecordingRequest, context: Context) -> pb.DumpRecordingResponse:
        """Write the flight recorder to a file."""
        _log_call("dump_recording", context)
        return pb.DumpRecordingResponse(path=str(await self._operations.dump_recording()))

    async def FlushPrefixCache(
        self, request: pb.FlushPrefixCacheRequest, context: Context
    ) -> pb.FlushPrefixCacheResponse:
        """Forget cached prefixes."""
        _log_call("flush_prefix_cache", context)
        self._operations.flush_prefix_cache()
        return pb.FlushPrefixCacheResponse()

    async def SetLogLevel(self, request: pb.SetLogLevelRequest, context: Context) -> pb.SetLogLevelResponse:
        """Log more, or less."""
        level = _LEVELS.get(request.level)
        if level is None:
            raise InvalidRequest.at("level", f"must be one of {', '.join(_LEVELS.values())}")
        _log_call("set_log_level", context, log_level=level)
        return pb.SetLogLevelResponse(previous=_NUMBERS[self._operations.set_log_level(level)])


def _log_call(what: str, context: Context, **fields: str) -> None:
    log.warning("operator", order=what, name=identity.caller(context).tenant, **fields)
