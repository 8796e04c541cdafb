"""The RPCs of a client, and the interface of what sends them, once for asyncio and once for threads.

A transport sends one request, returns its responses and raises a LineclearError for whatever goes wrong. It never
retries. `lineclear.client.testing.FakeTransport` is a transport without a server.

The two messages of grpc.health.v1 have one field each and are encoded here, so that the client needs no package for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from google.protobuf.message import DecodeError, Message

from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2, steps_pb2
from lineclear.v1 import inference_pb2 as pb

from .results import HealthStatus

Req = TypeVar("Req")
Res = TypeVar("Res")
Res_co = TypeVar("Res_co", covariant=True)
_Req = TypeVar("_Req", bound=Message)
_Res = TypeVar("_Res", bound=Message)

Options: TypeAlias = Sequence[tuple[str, Any]]
Pairs: TypeAlias = Sequence[tuple[str, str | bytes]]

SERVICE: Final = "lineclear.v1.InferenceService"
ADMIN: Final = "lineclear.v1.AdminService"


@dataclass(frozen=True, slots=True)
class Method(Generic[Req, Res]):
    """One RPC. `decode` raises DecodeError if the bytes are not such a message."""

    path: str
    encode: Callable[[Req], bytes]
    decode: Callable[[bytes], Res]
    error_responses: Mapping[str, Res] = field(default_factory=dict, hash=False)
    """Responses that the server sends as an error, by gRPC code."""


class AsyncCall(Protocol[Res_co]):
    """A running call: iterate for its responses. Raises a LineclearError if the call fails."""

    async def __anext__(self) -> Res_co: ...
    def cancel(self) -> None:
        """End the call now. Its reader gets Cancelled. May be called again, and after the end."""


class Call(Protocol[Res_co]):
    """`AsyncCall` for threads."""

    def __next__(self) -> Res_co: ...
    def cancel(self) -> None: ...


class AsyncTransport(Protocol):
    """The calls that a client makes. `target` names the server in error messages."""

    @property
    def target(self) -> str: ...
    def stream_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> AsyncCall[Res]: ...
    async def unary_async(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    async def close_async(self) -> None: ...


class Transport(Protocol):
    """`AsyncTransport` for threads."""

    @property
    def target(self) -> str: ...
    def stream(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Call[Res]: ...
    def unary(
        self, method: Method[Req, Res], request: Req, *, timeout_seconds: float | None, metadata: Pairs
    ) -> Res: ...
    def close(self) -> None: ...


def encode_health_request(service: str) -> bytes:
    """Encode a grpc.health.v1.HealthCheckRequest: field 1 is the service."""
    name = service.encode(errors="replace")
    if len(name) > 127:  # so that its length is one byte
        raise InvalidRequest.at("service", "must have at most 127 bytes")
    return b"\x0a" + bytes([len(name)]) + name if name else b""


def decode_health_response(data: bytes) -> HealthStatus:
    """Decode a grpc.health.v1.HealthCheckResponse: field 1 is the status. A status added later becomes UNKNOWN."""
    if not data:
        return HealthStatus.UNKNOWN
    if len(data) != 2 or data[0] != 0x08:
        raise DecodeError("not a HealthCheckResponse")
    statuses = list(HealthStatus)
    return statuses[data[1]] if data[1] < len(statuses) else HealthStatus.UNKNOWN


def _method(service: str, request: type[_Req], response: type[_Res]) -> Method[_Req, _Res]:
    path = f"/{service}/{request.__name__.removesuffix('Request')}"
    return Method(path, request.SerializeToString, response.FromString)


GENERATE: Final = _method(SERVICE, pb.GenerateRequest, pb.GenerateResponse)
SESSION: Final = _method(SERVICE, pb.SessionRequest, pb.SessionResponse)
SUBMIT: Final = _method(SERVICE, pb.SubmitRequest, pb.SubmitResponse)
ATTACH: Final[Method[pb.AttachRequest, pb.GenerateResponse]] = Method(
    f"/{SERVICE}/Attach", pb.AttachRequest.SerializeToString, lambda data: pb.AttachResponse.FromString(data).response
)
GET_RESULT: Final = _method(SERVICE, pb.GetResultRequest, pb.GetResultResponse)
CANCEL: Final = _method(SERVICE, pb.CancelRequest, pb.CancelResponse)
SCORE: Final = _method(SERVICE, pb.ScoreRequest, pb.ScoreResponse)
EMBED: Final = _method(SERVICE, pb.EmbedRequest, pb.EmbedResponse)
TOKENIZE: Final = _method(SERVICE, pb.TokenizeRequest, pb.TokenizeResponse)
DETOKENIZE: Final = _method(SERVICE, pb.DetokenizeRequest, pb.DetokenizeResponse)
GET_MODEL: Final = _method(SERVICE, pb.GetModelRequest, pb.GetModelResponse)
GET_STATS: Final = _method(SERVICE, pb.GetStatsRequest, pb.GetStatsResponse)
HEALTH: Final[Method[str, HealthStatus]] = Method(
    "/grpc.health.v1.Health/Check",
    encode_health_request,
    decode_health_response,
    {"NOT_FOUND": HealthStatus.SERVICE_UNKNOWN},
)
DRAIN: Final = _method(ADMIN, admin_pb2.DrainRequest, admin_pb2.DrainResponse)
DUMP_RECORDING: Final = _method(ADMIN, admin_pb2.DumpRecordingRequest, admin_pb2.DumpRecordingResponse)
FLUSH_PREFIX_CACHE: Final = _method(ADMIN, admin_pb2.FlushPrefixCacheRequest, admin_pb2.FlushPrefixCacheResponse)
RESTART_WORKERS: Final = _method(ADMIN, admin_pb2.RestartWorkersRequest, admin_pb2.RestartWorkersResponse)
SET_LOG_LEVEL: Final = _method(ADMIN, admin_pb2.SetLogLevelRequest, admin_pb2.SetLogLevelResponse)
WATCH_STEPS: Final = _method(ADMIN, steps_pb2.WatchStepsRequest, steps_pb2.WatchStepsResponse)
GET_SCHEDULING: Final = _method(ADMIN, admin_pb2.GetSchedulingRequest, admin_pb2.GetSchedulingResponse)
LOAD_ADAPTER: Final = _method(ADMIN, admin_pb2.LoadAdapterRequest, admin_pb2.LoadAdapterResponse)
UNLOAD_ADAPTER: Final = _method(ADMIN, admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse)
PROFILE: Final = _method(ADMIN, admin_pb2.ProfileRequest, admin_pb2.ProfileResponse)
LIST_ADAPTERS: Final = _method(ADMIN, admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse)
UPDATE_SCHEDULING: Final = _method(ADMIN, admin_pb2.UpdateSchedulingRequest, admin_pb2.UpdateSchedulingResponse)
