"""Orders to a server by whoever operates it. They are answered at its admin address alone."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from lineclear.v1 import admin_pb2 as pb

from . import rpc_methods
from ._sync.client import Client
from .requests import UNSET

LogLevel = Literal["debug", "info", "warning", "error"]


class DrainStatus(NamedTuple):
    """What a server that is leaving has still to do."""

    requests_in_progress: int
    """Those that wait included."""
    seconds: float
    """Until what is left of them is ended. They can go on elsewhere, and clients of ours do so by themselves."""


class AdminClient:
    """For scripts: `Operator(Client(admin_address)).drain()`. Raises the LineclearError that a call ended with."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def drain(self) -> DrainStatus:
        """Have the server leave as after SIGTERM. Asked again, it says what remains by then."""
        answer = self._client._unary(rpc_methods.DRAIN, pb.DrainRequest(), UNSET)
        return DrainStatus(answer.requests_in_progress, answer.time_remaining.ToNanoseconds() / 1e9)

    def dump_recording(self) -> str:
        """Have the flight recorder written; the path of the file, on the server's machine."""
        return self._client._unary(rpc_methods.DUMP_RECORDING, pb.DumpRecordingRequest(), UNSET).path

    def flush_prefix_cache(self) -> None:
        """Have all cached prefixes forgotten."""
        self._client._unary(rpc_methods.FLUSH_PREFIX_CACHE, pb.FlushPrefixCacheRequest(), UNSET)

    def set_log_level(self, level: LogLevel) -> LogLevel:
        """Have the scheduler log from this level upwards; the level before."""
        request = pb.SetLogLevelRequest(level=pb.LogLevel.Value(f"LOG_LEVEL_{level.upper()}"))
        previous = self._client._unary(rpc_methods.SET_LOG_LEVEL, request, UNSET).previous
        return cast("LogLevel", pb.LogLevel.Name(previous).removeprefix("LOG_LEVEL_").lower())
