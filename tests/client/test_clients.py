"""Client and AsyncClient against a server in this process: what arrives, what leaves, and how calls end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.patience import PATIENCE_SECONDS

from lineclear import errors
from lineclear.client import AsyncClient, Client, FinishReason, HealthStatus, Request, RetryPolicy, Sampling
from lineclear.errors import LineclearError, QueueFull, Unreachable, Violation, tree
from lineclear.v1 import inference_pb2 as pb


def hold(server: Any) -> Any:
    """A script that says one token and then waits until the call ends."""

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        yield server.tokens(0, 1, text="a")
        server.wait_for_end(context)

    return script


# -- what arrives


def test_an_answer_comes_piece_by_piece(server: Any, client: Any) -> None:
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


def test_a_result_before_the_end_is_refused_but_what_came_is_there(client: Any) -> None:
    deltas, stream = client.read("one two three", take=2)
    assert len(deltas) == 2
    assert (stream.text, stream.token_ids) == ("one", (100,))
    with pytest.raises(RuntimeError, match="not complete"):
        _ = stream.result


def test_a_stream_is_read_inside_its_block(server: Any) -> None:
    with Client(server.target) as client, pytest.raises(RuntimeError, match="inside its `with`"):
        next(client.stream("x"))
    assert server.requests == []


def test_a_gap_is_data_loss_and_the_call_is_cancelled(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.tokens(0, 1)
        yield server.tokens(2, 3)
        server.wait_for_end(context)

    server.script = script
    with pytest.raises(errors.DataLoss, match="token 2, token 1 was expected"):
        client.generate("x")
    assert server.ended.wait(PATIENCE_SECONDS)


def test_a_stream_without_its_end_is_data_loss(server: Any, client: Any) -> None:
    server.script = lambda request, context: iter([server.started(), server.tokens(0, 1)])
    with pytest.raises(errors.DataLoss, match="without the end"):
        client.generate("x")


def test_the_other_calls(client: Any) -> None:
    assert client.tokenize("hé") == list("hé".encode())
    assert client.tokenize([{"role": "user", "content": "a"}]) == [97]
    assert client.detokenize([104, 105], keep_special_tokens=True) == "hi!"
    model = client.model()
    assert (model.model_id, model.eos_token_ids, model.limits.num_blocks) == ("tiny", (2, 7), 99)
    stats = client.stats()
    assert (stats.uptime_seconds, stats.totals.requests_finished, stats.gauges.draining) == (1.5, 17, True)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"\x08\x01", HealthStatus.SERVING),
        (b"\x08\x02", HealthStatus.NOT_SERVING),
        (b"\x08\x03", HealthStatus.SERVICE_UNKNOWN),
        (b"", HealthStatus.UNKNOWN),
        (b"\x08\x63", HealthStatus.UNKNOWN),
        (grpc.StatusCode.NOT_FOUND, HealthStatus.SERVICE_UNKNOWN),
    ],
)
def test_health(server: Any, client: Any, answer: Any, status: HealthStatus) -> None:
    server.health_answers = [answer]
    assert client.health() is status
    assert server.health_asked == [b"\x0a\x1dlineclear.v1.InferenceService"]


def test_health_speaks_as_the_official_package_does() -> None:
    health_pb2 = pytest.importorskip("grpc_health.v1.health_pb2", reason="the light client goes without it")
    from lineclear.client.methods import decode_health_response, encode_health_request

    for service in ("", "lineclear.v1.InferenceService", "x" * 127):
        assert encode_health_request(service) == health_pb2.HealthCheckRequest(service=service).SerializeToString()
    for name, number in health_pb2.HealthCheckResponse.ServingStatus.items():
        data = health_pb2.HealthCheckResponse(status=number).SerializeToString()
        assert decode_health_response(data) == name.lower()


def test_health_of_what_is_no_health_answer_is_data_loss(server: Any, client: Any) -> None:
    server.health_answers = [b"\x12\x01x"]
    with pytest.raises(errors.DataLoss):
        client.health()
    with pytest.raises(errors.InvalidRequest):
        client.health("x" * 128)


def test_a_unix_socket_is_a_target(tmp_path: Path, server: Any) -> None:
    local = type(server)(f"unix:{tmp_path}/s")
    try:
        with Client(local.target) as client:
            assert client.generate("a b").text == "a b"
    finally:
        local.stop()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_tls(tmp_path: Path, server: Any, client: Any) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    pair = (key.read_bytes(), certificate.read_bytes())
    secure = type(server)("localhost:0", grpc.ssl_server_credentials([pair]))
    try:
        client.target = secure.target.replace("127.0.0.1", "localhost")
        trusting = client.with_settings(credentials=grpc.ssl_channel_credentials(certificate.read_bytes()))
        assert trusting.generate("a b").text == "a b"
        with pytest.raises(Unreachable):
            client.with_settings(credentials=grpc.ssl_channel_credentials()).generate("a b")
    finally:
        secure.stop()


@pytest.mark.parametrize(
    ("target", "sentence"),
    [("", "is empty"), ("https://x:1", "pass credentials"), ("unix:/" + "x" * 120, "at most 107 bytes")],
)
def test_a_target_that_cannot_be_one_is_refused(target: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Client(target)
    with pytest.raises(ValueError, match=sentence):
        AsyncClient(target)


def test_a_target_may_leave_out_the_port_or_name_a_scheme() -> None:
    assert Client("somewhere").target == "somewhere:50051"
    assert Client("grpc://somewhere:1").target == "somewhere:1"
    assert Client("[::1]:5").target == "[::1]:5"


# -- what leaves


def test_metadata_of_the_client_and_of_the_call_arrive(server: Any, client: Any) -> None:
    client.with_settings(metadata={"tenant": "a"}).generate("x", metadata=[("Trace", "t"), ("raw-bin", b"\x00\xff")])
    seen = server.metadata[0]
    assert (seen["tenant"], seen["trace"], seen["raw-bin"]) == ("a", "t", b"\x00\xff")
    assert seen["user-agent"].startswith("lineclear-python/")


def test_the_clients_sampling_fills_what_a_call_leaves_open(server: Any, client: Any) -> None:
    client.with_settings(sampling=Sampling(max_tokens=3, seed=1)).generate("x", Sampling(seed=2), top_k=4)
    sampling = server.requests[0].sampling
    assert (sampling.max_tokens, sampling.seed, sampling.top_k) == (3, 2, 4)


@pytest.mark.parametrize(
    ("settings", "params", "least", "most"),
    [
        ({}, {}, 500, 600),
        ({"timeout_seconds": 50}, {}, 40, 50),
        ({"timeout_seconds": 50}, {"timeout_seconds": 9}, 5, 9),
    ],
)
def test_the_timeout_is_the_deadline_of_the_call(
    server: Any, client: Any, settings: dict[str, Any], params: dict[str, Any], least: float, most: float
) -> None:
    client.with_settings(**settings).generate("x", **params)
    assert least < server.remaining_seconds[0] <= most + 1  # gRPC rounds it up on the wire


def test_no_timeout_is_no_deadline(server: Any, client: Any) -> None:
    client.generate("x", timeout_seconds=None)
    remaining = server.remaining_seconds[0]
    assert remaining is None or remaining > 1e6


# -- how calls end


def test_leaving_the_block_cancels_the_call(server: Any, client: Any) -> None:
    server.script = hold(server)
    reached: list[bool] = []
    client.after_block = lambda: reached.append(server.ended.wait(PATIENCE_SECONDS))
    deltas, _ = client.read("x", take=2)
    assert (len(deltas), reached) == (2, [True])


def test_an_error_in_the_block_cancels_the_call(server: Any) -> None:
    server.script = hold(server)
    with Client(server.target) as client:
        with contextlib.suppress(KeyError), client.stream("x") as stream:
            next(stream)
            raise KeyError
        assert server.ended.wait(PATIENCE_SECONDS)


def test_cancelling_from_another_thread_ends_the_loop(server: Any) -> None:
    server.script = hold(server)
    with Client(server.target) as client, client.stream("x") as stream:
        assert [next(stream).text, next(stream).text] == ["", "a"]
        thread = threading.Thread(target=stream.cancel)
        thread.start()
        with pytest.raises(errors.Cancelled):
            next(stream)
        thread.join()
        with pytest.raises(StopIteration):
            next(stream)
        assert server.ended.wait(PATIENCE_SECONDS)


def test_cancelling_from_another_task_ends_the_loop(server: Any) -> None:
    server.script = hold(server)

    async def run() -> None:
        async with AsyncClient(server.target) as client, client.stream("x") as stream:
            assert [(await anext(stream)).text, (await anext(stream)).text] == ["", "a"]
            asyncio.get_running_loop().call_soon(stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)

    asyncio.run(run())
    assert server.ended.wait(PATIENCE_SECONDS)


def test_a_cancelled_task_stays_cancelled_and_its_call_too(server: Any) -> None:
    server.script = hold(server)

    async def run() -> None:
        async with AsyncClient(server.target) as client:
            begun = asyncio.Event()

            async def read() -> None:
                async with client.stream("x") as stream:
                    await anext(stream)
                    begun.set()
                    async for _ in stream:
                        pass

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(server.ended.wait, PATIENCE_SECONDS)

    asyncio.run(run())


def test_cancelling_during_a_pause_between_attempts_ends_the_pause(server: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=3600.0)]
    with Client(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(errors.Cancelled):
            next(stream)
        timer.join()

    async def run() -> None:
        server.failures = [QueueFull("full", retry_after_seconds=3600.0)]
        async with AsyncClient(server.target, timeout_seconds=None) as client, client.stream("x") as stream:
            asyncio.get_running_loop().call_later(0.05, stream.cancel)
            with pytest.raises(errors.Cancelled):
                await anext(stream)

    asyncio.run(run())


def test_a_deadline_missed_on_the_way(server: Any, client: Any) -> None:
    server.script = hold(server)
    with pytest.raises(errors.DeadlineExceeded, match="before the answer was complete"):
        client.generate("x", timeout_seconds=0.3)


KINDS = [kind for kind in tree() if kind not in (LineclearError, errors.Foreign)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_comes_back_as_itself(server: Any, client: Any, kind: type[LineclearError]) -> None:
    sent = kind(
        "what happened",
        retry_after_seconds=1.5,
        metadata={"limit": "512"},
        violations=[Violation("sampling.top_p", "is above 1")],
    )
    server.failures = [sent]
    with pytest.raises(LineclearError) as caught:
        client.generate("x")
    got = caught.value
    assert type(got) is kind
    assert str(got) == "what happened"
    assert (got.code, got.reason, got.retry_after_seconds, got.metadata, got.violations) == (
        sent.code, sent.reason, sent.retry_after_seconds, sent.metadata, sent.violations,
    )  # fmt: skip


def test_no_two_errors_share_a_reason() -> None:
    assert len({kind.reason for kind in KINDS}) == len(KINDS)


def test_an_error_after_some_tokens_is_raised_after_them(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.tokens(0, 1, text="a")
        server.fail(context, errors.NonFiniteLogits("gone"))

    server.script = script
    with pytest.raises(errors.NonFiniteLogits, match="gone"):
        client.with_settings(max_attempts=5).generate("x")
    assert len(server.requests) == 1  # half an answer is never asked for again


def test_a_status_of_somebody_else_keeps_its_code(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "no token")
        yield server.started()

    server.script = script
    with pytest.raises(errors.Foreign, match="no token") as caught:
        client.generate("x")
    assert caught.value.code == "PERMISSION_DENIED"


def test_nobody_there_is_unreachable(tmp_path: Path, client: Any) -> None:
    client.target = f"unix:{tmp_path}/nobody"
    for call in (client.generate, client.tokenize, client.health):
        with pytest.raises(Unreachable, match="no answer from unix:"):
            call("x")


def test_a_server_that_dies_in_the_middle_is_unreachable(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        yield server.started()
        threading.Thread(target=server.stop).start()
        server.wait_for_end(context)

    server.script = script
    with pytest.raises(Unreachable):
        client.generate("x")


def test_a_call_that_the_server_cancels_is_unreachable_and_may_be_tried_again(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(server.requests) == 1:
            context.abort(grpc.StatusCode.CANCELLED, "stopping")  # as a server does that is being stopped
        yield server.finished(0)

    server.script = script
    with pytest.raises(Unreachable, match="it ended the call"):
        client.generate("x")
    server.requests.clear()
    client.with_settings(max_attempts=2).generate("x")
    assert len(server.requests) == 2


def test_closing_the_client_cancels_what_is_running(server: Any) -> None:
    server.script = hold(server)
    client = Client(server.target)
    with client.stream("x") as stream:
        next(stream)
        next(stream)
        threading.Thread(target=client.close).start()
        with pytest.raises(errors.Cancelled):
            next(stream)
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("x")

    async def run() -> None:
        async with AsyncClient(server.target) as client, client.stream("x") as stream:
            await anext(stream)
            await anext(stream)
            closing = asyncio.create_task(client.close())
            with pytest.raises(errors.Cancelled):
                await anext(stream)
            await closing
            with pytest.raises(RuntimeError, match="the client is closed"):
                await client.generate("x")

    asyncio.run(run())


def test_an_async_client_belongs_to_one_event_loop(server: Any) -> None:
    client = AsyncClient(server.target)
    assert asyncio.run(client.generate("a b")).text == "a b"
    with pytest.raises(RuntimeError, match="event loop of its first call"):
        asyncio.run(client.generate("a b"))


# -- retries

QUICK = RetryPolicy(max_attempts=3, first_pause_seconds=0.01, max_pause_seconds=0.02)


@pytest.mark.parametrize("refused", [0, 1, 2])
def test_a_full_queue_is_tried_again(server: Any, client: Any, refused: int) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)] * refused
    patient = client.with_settings(max_attempts=None, retry=QUICK)
    assert patient.generate("a b").text == "a b"
    assert len(server.requests) == refused + 1


def test_attempts_are_bounded(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)] * 3
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=None, retry=QUICK).generate("a b")
    assert len(server.requests) == 3


def test_one_attempt_switches_retries_off(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.01)]
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=1).generate("x")
    assert len(server.requests) == 1


def test_what_cannot_help_is_not_tried_again(server: Any, client: Any) -> None:
    for error in (QueueFull("full"), errors.InvalidRequest("no"), errors.InternalError("bug")):
        server.requests.clear()
        server.failures = [error]
        with pytest.raises(type(error)):
            client.with_settings(max_attempts=5).generate("x")
        assert len(server.requests) == 1


def test_a_pause_beyond_the_deadline_is_not_begun(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=600.0)]
    began = time.monotonic()
    with pytest.raises(QueueFull):
        client.with_settings(max_attempts=5).generate("x", timeout_seconds=PATIENCE_SECONDS)
    assert time.monotonic() - began < PATIENCE_SECONDS


def test_later_attempts_have_only_the_time_that_is_left(server: Any, client: Any) -> None:
    server.failures = [QueueFull("full", retry_after_seconds=0.5)]
    client.with_settings(max_attempts=2).generate("x", timeout_seconds=10)  # longer ones travel in coarser steps
    first, second = server.remaining_seconds
    assert second <= first - 0.4


def test_a_server_that_comes_up_late_is_reached(tmp_path: Path, server: Any, client: Any) -> None:
    address = f"unix:{tmp_path}/late"
    late: list[Any] = []
    timer = threading.Timer(0.1, lambda: late.append(type(server)(address)))
    timer.start()
    client.target = address
    policy = RetryPolicy(max_attempts=200, first_pause_seconds=0.05, max_pause_seconds=0.1)
    assert client.with_settings(max_attempts=None, retry=policy).generate("a b").text == "a b"
    timer.join()
    late[0].stop()


# -- many


def test_many_answers_keep_the_order_of_the_prompts(server: Any, client: Any) -> None:
    prompts = [f"{n} x" for n in range(40)]
    seen: list[tuple[int, int | None]] = []
    results = client.generate_many(prompts, concurrency=7, progress=lambda done, total: seen.append((done, total)))
    assert [result.text for result in results] == prompts
    assert seen[-1] == (40, 40)
    assert seen == sorted(seen)
    assert server.most_open <= 7


def test_as_many_run_at_once_as_asked_for(server: Any, client: Any) -> None:
    gate = threading.Barrier(5)  # opens only when five calls are in their handlers together

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        gate.wait(PATIENCE_SECONDS)
        yield server.finished(0)

    server.script = script
    assert len(client.generate_many(iter("abcdefghij"), concurrency=5)) == 10
    assert server.most_open == 5


def test_a_failure_takes_the_place_of_its_answer(server: Any, client: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "bad":
            server.fail(context, errors.PromptTooLong("too long"))
        yield server.finished(0)

    server.script = script
    results = client.generate_many(["good", "bad", "\ud800", "good"], return_exceptions=True)
    kinds = [type(result).__name__ for result in results]
    assert kinds == ["Generation", "PromptTooLong", "Malformed", "Generation"]


def test_the_first_failure_ends_the_batch_and_cancels_the_rest(server: Any, client: Any) -> None:
    running = threading.Event()

    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "bad":
            assert running.wait(PATIENCE_SECONDS)
            server.fail(context, errors.PromptTooLong("too long"))
        yield server.started()
        running.set()
        server.wait_for_end(context)

    server.script = script
    with pytest.raises(errors.PromptTooLong):
        client.generate_many(["endless", "bad", *["never asked"] * 50], concurrency=2)
    assert len(server.requests) <= 3


def test_a_wrong_argument_is_raised_not_returned(client: Any) -> None:
    with pytest.raises(TypeError, match="no such parameter"):
        client.generate_many(["x"], return_exceptions=True, temprature=1)


def test_nothing_to_do_is_done(client: Any) -> None:
    assert client.generate_many([]) == []
    assert client.generate_many(iter(())) == []


def test_every_prompt_may_bring_its_own_parameters(server: Any, client: Any) -> None:
    client.generate_many([Request(prompt="a", priority=1), "b"], max_tokens=3)
    by_text = {request.text: request for request in server.requests}
    assert (by_text["a"].priority, by_text["a"].sampling.max_tokens, by_text["b"].sampling.max_tokens) == (1, 3, 3)


def test_leaving_a_loop_over_many_cancels_the_rest(server: Any) -> None:
    def script(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if request.text == "0":
            yield server.finished(0)
        else:
            server.wait_for_end(context)

    server.script = script
    with Client(server.target) as client:
        outcomes = client.generate_each(map(str, range(10**9)), concurrency=4, window=6)
        assert next(outcomes).finish_reason == "length"  # type: ignore[union-attr]
        outcomes.close()
    assert len(server.requests) <= 7
