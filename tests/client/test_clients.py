"""Client and AsyncClient against a server in this process: what arrives, and what leaves."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
import trustme
from client.conftest import finished, started, tokens
from support.time_limits import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import Client, FinishReason, HealthStatus
from lineclear.errors import Unreachable
from lineclear.v1 import inference_pb2 as pb

# -- what arrives


def test_answer_streams_delta_by_delta(server: Any, client: Any) -> None:
    deltas, stream = client.read("one two three", max_tokens=5)
    assert [(delta.first_index, delta.token_ids, delta.text) for delta in deltas] == [
        (0, (), ""), (0, (100,), "one"), (1, (101,), " two"), (2, (102,), " three"), (3, (), ""),
    ]  # fmt: skip
    assert deltas[0].started.prompt_tokens == 3
    assert [delta.finish_reason for delta in deltas] == [None] * 4 + [FinishReason.LENGTH]
    assert (stream.result.text, stream.result.token_ids) == ("one two three", (100, 101, 102))
    assert server.requests[0] == pb.GenerateRequest(text="one two three", sampling={"max_tokens": 5})


def test_generate_returns_the_whole_answer(client: Any) -> None:
    result = client.generate([{"role": "user", "content": "a b"}])
    assert (result.text, result.usage.completion_tokens, result.finish_reason) == ("a b", 2, "length")
    assert result.started.request_id == "r"
    assert result.to_dict()["token_ids"] == (100, 101)


def test_result_before_the_end_is_an_error(client: Any) -> None:
    deltas, stream = client.read("one two three", take=2)
    assert len(deltas) == 2
    assert (stream.text, stream.token_ids) == ("one", (100,))
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.result


def test_a_stream_is_read_inside_its_block(server: Any) -> None:
    with Client(server.target) as client, pytest.raises(RuntimeError, match="inside its `with`"):
        next(client.stream("x"))
    assert server.requests == []


@pytest.mark.parametrize(
    ("responses", "sentence"),
    [
        ([tokens(0, 1), tokens(2, 3)], "token 2, token 1 was expected"),
        ([started(), finished(0), tokens(0, 100)], "after the end"),
        ([started(), tokens(0, 1)], "without the end"),
    ],
)
def test_wrong_responses_are_data_loss_and_the_call_is_cancelled(
    server: Any, client: Any, responses: list[pb.GenerateResponse], sentence: str
) -> None:
    server.play(responses if sentence == "without the end" else [*responses, server.wait_for_end])
    with pytest.raises(errors.DataLoss, match=sentence):
        client.generate("x")
    assert server.ended.wait(PATIENCE_SECONDS)


def test_unary_calls(client: Any) -> None:
    assert client.tokenize("hé") == list("hé".encode())
    assert client.tokenize([{"role": "user", "content": "a"}]) == [97]
    assert client.detokenize([104, 105], keep_special_tokens=True) == "hi!"
    model = client.model()
    assert (model.model_id, model.eos_token_ids, model.limits.num_blocks) == ("tiny", (2, 7), 99)
    stats = client.stats()
    assert (stats.uptime_seconds, stats.counters.requests_finished, stats.gauges.draining) == (1.5, 17, True)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"\x08\x01", HealthStatus.SERVING),
        (b"\x08\x63", HealthStatus.UNKNOWN),
        (grpc.StatusCode.NOT_FOUND, HealthStatus.SERVICE_UNKNOWN),
    ],
)
def test_health(server: Any, client: Any, answer: Any, status: HealthStatus) -> None:
    server.health_answers = [answer]
    assert client.health() is status
    assert server.health_asked == [b"\x0a\x1dlineclear.v1.InferenceService"]


def test_health_messages_equal_grpc_health() -> None:
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2", reason="the light client goes without it")
    from lineclear.client.rpc_methods import decode_health_response, encode_health_request

    for service in ("", "lineclear.v1.InferenceService", "x" * 127):
        assert encode_health_request(service) == health_pb2.HealthCheckRequest(service=service).SerializeToString()
    for name, number in health_pb2.HealthCheckResponse.ServingStatus.items():
        data = health_pb2.HealthCheckResponse(status=number).SerializeToString()
        assert decode_health_response(data) == name.lower()


def test_invalid_health_response_is_data_loss(server: Any, client: Any) -> None:
    server.health_answers = [b"\x12\x01x"]
    with pytest.raises(errors.DataLoss):
        client.health()
    with pytest.raises(errors.InvalidRequest):
        client.health("x" * 128)


def test_tls(server: Any, client: Any) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost")
    pair = (leaf.private_key_pem.bytes(), leaf.cert_chain_pems[0].bytes())
    secure = type(server)("localhost:0", grpc.ssl_server_credentials([pair]))
    try:
        client.target = secure.target.replace("127.0.0.1", "localhost")
        trusting = client.with_settings(credentials=grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
        assert trusting.generate("a b").text == "a b"
        with pytest.raises(Unreachable):
            client.with_settings(credentials=grpc.ssl_channel_credentials()).generate("a b")
    finally:
        secure.stop()


# -- what leaves


def test_metadata_of_client_and_call_are_sent(server: Any, client: Any) -> None:
    client.with_settings(metadata={"tenant": "a"}).generate("x", metadata=[("Trace", "t"), ("raw-bin", b"\x00\xff")])
    seen = server.metadata[0]
    assert (seen["tenant"], seen["trace"], seen["raw-bin"]) == ("a", "t", b"\x00\xff")
    assert seen["user-agent"].startswith("lineclear-python/")


@pytest.mark.parametrize(
    ("settings", "params", "least", "most"),
    [
        ({}, {}, 500, 600),
        ({"timeout_seconds": 50}, {}, 40, 50),
        ({"timeout_seconds": 50}, {"timeout_seconds": 9}, 5, 9),
        ({}, {"timeout_seconds": None}, 1e6, math.inf),
    ],
)
def test_the_timeout_is_the_deadline_of_the_call(
    server: Any, client: Any, settings: dict[str, Any], params: dict[str, Any], least: float, most: float
) -> None:
    client.with_settings(**settings).generate("x", **params)
    assert least < (server.remaining_seconds[0] or math.inf) <= most + 1  # gRPC rounds it up on the wire
