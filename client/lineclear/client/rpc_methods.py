"""The RPCs of a client: path, encoder and decoder of each.

The two messages of grpc.health.v1 have one field each and are encoded here, so that the client needs no package for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError

from lineclear.errors import InvalidRequest
from lineclear.v1 import admin_pb2, steps_pb2
from lineclear.v1 import inference_pb2 as pb

from .results import HealthStatus

Req = TypeVar("Req")
Res = TypeVar("Res")

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


GENERATE: Final[Method[pb.GenerateRequest, pb.GenerateResponse]] = Method(
    f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
)
SESSION: Final[Method[pb.SessionRequest, pb.SessionResponse]] = Method(
    f"/{SERVICE}/Session", pb.SessionRequest.SerializeToString, pb.SessionResponse.FromString
)
SUBMIT: Final[Method[pb.SubmitRequest, pb.SubmitResponse]] = Method(
    f"/{SERVICE}/Submit", pb.SubmitRequest.SerializeToString, pb.SubmitResponse.FromString
)
ATTACH: Final[Method[pb.AttachRequest, pb.GenerateResponse]] = Method(
    f"/{SERVICE}/Attach", pb.AttachRequest.SerializeToString, lambda data: pb.AttachResponse.FromString(data).response
)
GET_RESULT: Final[Method[pb.GetResultRequest, pb.GetResultResponse]] = Method(
    f"/{SERVICE}/GetResult", pb.GetResultRequest.SerializeToString, pb.GetResultResponse.FromString
)
CANCEL: Final[Method[pb.CancelRequest, pb.CancelResponse]] = Method(
    f"/{SERVICE}/Cancel", pb.CancelRequest.SerializeToString, pb.CancelResponse.FromString
)
SCORE: Final[Method[pb.ScoreRequest, pb.ScoreResponse]] = Method(
    f"/{SERVICE}/Score", pb.ScoreRequest.SerializeToString, pb.ScoreResponse.FromString
)
EMBED: Final[Method[pb.EmbedRequest, pb.EmbedResponse]] = Method(
    f"/{SERVICE}/Embed", pb.EmbedRequest.SerializeToString, pb.EmbedResponse.FromString
)
TOKENIZE: Final[Method[pb.TokenizeRequest, pb.TokenizeResponse]] = Method(
    f"/{SERVICE}/Tokenize", pb.TokenizeRequest.SerializeToString, pb.TokenizeResponse.FromString
)
DETOKENIZE: Final[Method[pb.DetokenizeRequest, pb.DetokenizeResponse]] = Method(
    f"/{SERVICE}/Detokenize", pb.DetokenizeRequest.SerializeToString, pb.DetokenizeResponse.FromString
)
GET_MODEL: Final[Method[pb.GetModelRequest, pb.GetModelResponse]] = Method(
    f"/{SERVICE}/GetModel", pb.GetModelRequest.SerializeToString, pb.GetModelResponse.FromString
)
GET_STATS: Final[Method[pb.GetStatsRequest, pb.GetStatsResponse]] = Method(
    f"/{SERVICE}/GetStats", pb.GetStatsRequest.SerializeToString, pb.GetStatsResponse.FromString
)
HEALTH: Final[Method[str, HealthStatus]] = Method(
    "/grpc.health.v1.Health/Check",
    encode_health_request,
    decode_health_response,
    {"NOT_FOUND": HealthStatus.SERVICE_UNKNOWN},
)
DRAIN: Final[Method[admin_pb2.DrainRequest, admin_pb2.DrainResponse]] = Method(
    f"/{ADMIN}/Drain", admin_pb2.DrainRequest.SerializeToString, admin_pb2.DrainResponse.FromString
)
DUMP_RECORDING: Final[Method[admin_pb2.DumpRecordingRequest, admin_pb2.DumpRecordingResponse]] = Method(
    f"/{ADMIN}/DumpRecording",
    admin_pb2.DumpRecordingRequest.SerializeToString,
    admin_pb2.DumpRecordingResponse.FromString,
)
FLUSH_PREFIX_CACHE: Final[Method[admin_pb2.FlushPrefixCacheRequest, admin_pb2.FlushPrefixCacheResponse]] = Method(
    f"/{ADMIN}/FlushPrefixCache",
    admin_pb2.FlushPrefixCacheRequest.SerializeToString,
    admin_pb2.FlushPrefixCacheResponse.FromString,
)
RESTART_WORKERS: Final[Method[admin_pb2.RestartWorkersRequest, admin_pb2.RestartWorkersResponse]] = Method(
    f"/{ADMIN}/RestartWorkers",
    admin_pb2.RestartWorkersRequest.SerializeToString,
    admin_pb2.RestartWorkersResponse.FromString,
)
SET_LOG_LEVEL: Final[Method[admin_pb2.SetLogLevelRequest, admin_pb2.SetLogLevelResponse]] = Method(
    f"/{ADMIN}/SetLogLevel",
    admin_pb2.SetLogLevelRequest.SerializeToString,
    admin_pb2.SetLogLevelResponse.FromString,
)
WATCH_STEPS: Final[Method[steps_pb2.WatchStepsRequest, steps_pb2.WatchStepsResponse]] = Method(
    f"/{ADMIN}/WatchSteps", steps_pb2.WatchStepsRequest.SerializeToString, steps_pb2.WatchStepsResponse.FromString
)
GET_SCHEDULING: Final[Method[admin_pb2.GetSchedulingRequest, admin_pb2.GetSchedulingResponse]] = Method(
    f"/{ADMIN}/GetScheduling",
    admin_pb2.GetSchedulingRequest.SerializeToString,
    admin_pb2.GetSchedulingResponse.FromString,
)
LOAD_ADAPTER: Final[Method[admin_pb2.LoadAdapterRequest, admin_pb2.LoadAdapterResponse]] = Method(
    f"/{ADMIN}/LoadAdapter",
    admin_pb2.LoadAdapterRequest.SerializeToString,
    admin_pb2.LoadAdapterResponse.FromString,
)
UNLOAD_ADAPTER: Final[Method[admin_pb2.UnloadAdapterRequest, admin_pb2.UnloadAdapterResponse]] = Method(
    f"/{ADMIN}/UnloadAdapter",
    admin_pb2.UnloadAdapterRequest.SerializeToString,
    admin_pb2.UnloadAdapterResponse.FromString,
)
LIST_ADAPTERS: Final[Method[admin_pb2.ListAdaptersRequest, admin_pb2.ListAdaptersResponse]] = Method(
    f"/{ADMIN}/ListAdapters",
    admin_pb2.ListAdaptersRequest.SerializeToString,
    admin_pb2.ListAdaptersResponse.FromString,
)
UPDATE_SCHEDULING: Final[Method[admin_pb2.UpdateSchedulingRequest, admin_pb2.UpdateSchedulingResponse]] = Method(
    f"/{ADMIN}/UpdateScheduling",
    admin_pb2.UpdateSchedulingRequest.SerializeToString,
    admin_pb2.UpdateSchedulingResponse.FromString,
)
