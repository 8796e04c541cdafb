"""The client of the admin RPCs, which a server offers at its admin address only."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from lineclear.v1 import admin_pb2 as pb

from . import rpc_methods
from ._sync.client import Client
from .requests import UNSET

LogLevel = Literal["debug", "info", "warning", "error"]


class DrainStatus(NamedTuple):
    """The state of a server that drains."""

    requests_in_progress: int
    """Running and queued requests."""
    seconds: float
    """Seconds until the server ends the remaining requests. This client resumes them at another server."""


class AdminClient:
    """Admin commands for scripts: `AdminClient(Client(admin_address)).drain()`. Every call raises LineclearError."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def drain(self) -> DrainStatus:
        """Start a graceful shutdown, as SIGTERM does. A repeated call returns the current state."""
        answer = self._client._unary(rpc_methods.DRAIN, pb.DrainRequest(), UNSET)
        return DrainStatus(answer.requests_in_progress, answer.time_remaining.ToNanoseconds() / 1e9)

    def dump_recording(self) -> str:
        """Write the flight recording and return the path of the file on the machine of the server."""
        return self._client._unary(rpc_methods.DUMP_RECORDING, pb.DumpRecordingRequest(), UNSET).path

    def flush_prefix_cache(self) -> None:
        """Drop all cached prefixes."""
        self._client._unary(rpc_methods.FLUSH_PREFIX_CACHE, pb.FlushPrefixCacheRequest(), UNSET)

    def restart_workers(self, *, timeout_seconds: float | None = None) -> tuple[int, ...]:
        """Restart one worker after the other; return the pids of the new ones when the last has joined.

        No stream ends: the requests of a worker continue on the others. The restart goes on if the call times out.
        """
        answer = self._client._unary(rpc_methods.RESTART_WORKERS, pb.RestartWorkersRequest(), timeout_seconds)
        return tuple(answer.pids)

    def set_log_level(self, level: LogLevel) -> LogLevel:
        """Set the log level of the scheduler and return the previous level."""
        request = pb.SetLogLevelRequest(level=pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}"))
        previous = self._client._unary(rpc_methods.SET_LOG_LEVEL, request, UNSET).previous
        return cast("LogLevel", pb.LogLevel.Name(previous).removeprefix("LOG_LEVEL_").lower())
