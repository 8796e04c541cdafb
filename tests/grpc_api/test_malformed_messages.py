"""Unparsable bytes, messages of a later schema, and unknown methods."""

from __future__ import annotations

import pytest
from support.serving import Serving, error_of, read_all, text_request

from lineclear.v1 import inference_pb2 as pb

GENERATE = "/lineclear.v1.InferenceService/Generate"


@pytest.mark.parametrize(
    "data",
    [b"\x12\x02\xff\xfe", b"\x0a\x01\xff", b"\xff\xff\xff", b"\x12\xff\xff\xff\xff\x0f", b"\x2a\x03\x0d\x00", b"\x08"],
    ids=range(6),
)
async def test_unparsable_bytes_are_rejected(s: Serving, data: bytes) -> None:
    call = s.channel.unary_stream(GENERATE, request_serializer=bytes, response_deserializer=bytes)(data)
    error = await error_of(call)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "MALFORMED_MESSAGE")
    unary = s.channel.unary_unary(
        "/lineclear.v1.InferenceService/Tokenize", request_serializer=bytes, response_deserializer=bytes
    )
    assert (await error_of(unary(b"\x0a\x02\xff\xfe"))).reason == "MALFORMED_MESSAGE"
    health = s.channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=bytes, response_deserializer=bytes
    )
    assert (await error_of(health(b"\x0a\x02\xff\xfe"))).reason == "MALFORMED_MESSAGE"


async def test_unknown_fields_are_ignored(s: Serving) -> None:
    s.engine.answer = lambda request: []
    data = text_request().SerializeToString() + b"\xfa\x3e\x03abc"
    call = s.channel.unary_stream(
        GENERATE, request_serializer=bytes, response_deserializer=pb.GenerateResponse.FromString
    )(data)
    await read_all(call)


async def test_an_unknown_method(s: Serving) -> None:
    call = s.channel.unary_unary(
        "/lineclear.v1.InferenceService/Nothing", request_serializer=bytes, response_deserializer=bytes
    )(b"")
    assert (await error_of(call)).code == "UNIMPLEMENTED"
