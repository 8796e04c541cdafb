"""vllm.grpc.engine.VllmEngine on its own listener: each method by the generated stub, over an engine of the test."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from security.test_token_file import ALICE, token_file
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from support.serving import EOS, HELLO, HELLO_IDS, SMILE_IDS, Serving, serving, text_request
from support.small_tokenizers import byte_level, save
from support.time_limits import PATIENCE_SECONDS
from support.waiting import until

from lineclear.api_limits import MAX_MESSAGE_BYTES
from lineclear.errors import ServerDraining
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.core.prefix_keys import Prefix
from lineclear.scheduler.grpc_api.gateway.prefix_feed import PrefixFeed
from lineclear.scheduler.grpc_api.gateway.translation import to_lineclear
from lineclear.wire.messages import Logprobs


@asynccontextmanager
async def gateway(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Serving, Any]]:
    """Run a server, with a stub of its listener for gateways."""
    async with (
        serving(tmp_path, gateway_listen="127.0.0.1:0", **options) as s,
        grpc.aio.insecure_channel(s.server.gateway_address) as channel,
    ):
        yield s, vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(*ids: int, stream: bool = False, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="r",
        tokenized=vllm.TokenizedInput(input_ids=ids or HELLO_IDS),
        sampling_params=vllm.SamplingParams(**{"max_tokens": 8, **params}),
        stream=stream,
    )


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_stream_has_deltas_and_an_end(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        call = stub.Generate(request(stream=True))
        key = await s.engine.next_request()
        s.engine.start(key)
        for tokens in ([5], [6, 7], [EOS]):
            s.engine.tokens(key, tokens)
            chunk = (await call.read()).chunk
            assert (list(chunk.token_ids), chunk.completion_tokens) == (tokens, len(tokens))
        s.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
        end = (await call.read()).complete
        assert await call.read() is grpc.aio.EOF
        assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("stop", len(HELLO_IDS), 4)
        assert not end.output_ids


async def test_whole_answer_has_all_tokens(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        s.engine.answer = lambda _: [5, 6, 7]
        (answer,) = [answer async for answer in stub.Generate(request())]
        assert list(answer.complete.output_ids) == [5, 6, 7]
        assert answer.complete.finish_reason == "length"
        (asked,) = s.engine.submitted
        assert list(asked.prompt) == HELLO_IDS


async def test_sampling_reaches_the_engine(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        s.engine.answer = lambda _: [5]
        fields = {
            "temperature": 0.5,
            "top_p": 0.75,
            "top_k": 7,
            "min_p": 0.25,
            "frequency_penalty": 0.5,
            "presence_penalty": 1.5,
            "repetition_penalty": 1.25,
            "min_tokens": 2,
            "seed": 11,
            "ignore_eos": True,
            "logit_bias": {9: 1.5},
        }
        _ = [a async for a in stub.Generate(request(**fields))]
        sampling = s.engine.submitted[0].sampling
        for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "min_tokens"):
            assert getattr(sampling, name) == fields[name], name
        assert (sampling.repetition_penalty, sampling.seed) == (1.25, 11)
        assert dict(sampling.logit_bias) == {9: 1.5}
        assert EOS not in sampling.stop_ids


async def test_defaults_change_nothing(tmp_path: Path) -> None:
    """A gateway leaves out what its own caller left out: 0 means the neutral value, not 0."""
    async with gateway(tmp_path) as (s, stub):
        s.engine.answer = lambda _: [5]
        _ = [a async for a in stub.Generate(request())]
        sampling = s.engine.submitted[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (1.0, 1.0, 1.0)
        assert len(s.engine.submitted) == 1


async def test_outputs_end_one_by_one(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        s.engine.answer = lambda asked: [5, 6]
        ends = [a.complete async for a in stub.Generate(request(n=3, temperature=0.7))]
        assert sorted(end.index for end in ends) == [0, 1, 2]
        assert all(list(end.output_ids) == [5, 6] for end in ends)


async def test_logprobs_are_of_the_tokens(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        call = stub.Generate(request(logprobs=2, max_tokens=1))
        key = await s.engine.next_request()
        s.engine.start(key)
        s.engine.tokens(key, [5], [Logprobs(-0.5, ((5, -0.5), (9, -1.5)))])
        s.engine.finish_by(key, FinishReason.LENGTH)
        (answer,) = [a async for a in call]
        found = answer.complete.output_logprobs
        assert (list(found.token_ids), list(found.token_logprobs)) == ([5], [-0.5])
        assert (list(found.top_logprobs[0].token_ids), list(found.top_logprobs[0].values)) == ([5, 9], [-0.5, -1.5])


async def test_stop_string_is_named(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        s.engine.answer = lambda _: SMILE_IDS
        (answer,) = [a async for a in stub.Generate(request(stop=["how"], max_tokens=40))]
        assert (answer.complete.finish_reason, answer.complete.matched_stop_str) == ("stop", "how")


@pytest.mark.parametrize(
    "kind", [{"json_schema": '{"type": "integer"}'}, {"regex": "[0-9]+"}, {"choice": {"choices": ["a", "b"]}}]
)
async def test_constraint_is_compiled(tmp_path: Path, kind: dict[str, Any]) -> None:
    async with gateway(tmp_path, model=save(tmp_path / "model", byte_level())) as (s, stub):
        s.engine.answer = lambda _: [5]
        _ = [a async for a in stub.Generate(request(**kind))]
        assert s.engine.prepared
        assert s.engine.submitted[0].sampling.grammar == s.engine.prepared[0]


def test_required_calls_have_no_further_fields() -> None:
    """smg's schema of `tool_choice` "required" does not close its objects, which xgrammar does by itself."""
    call: Any = {"properties": {"name": {"enum": ["a"]}, "parameters": {"type": "object"}}, "required": ["name"]}
    schema: Any = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": [call]}}
    others = [{"anyOf": [call]}, {"items": {"anyOf": [{"type": "string"}]}, "title": "parameters"}, {"items": True}]
    for asked in (schema, *others):
        call.pop("additionalProperties", None)
        sent = request(json_schema=json.dumps(asked))
        call |= {"additionalProperties": False} if asked is schema else {}
        assert json.loads(to_lineclear(sent).sampling.structured_output.json_schema) == asked


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"structural_tag": "{}"}, "structural_tag"),
        ({"logprobs": -1}, "logprobs"),
        ({"temperature": -1.0}, "temperature"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    ],
)
async def test_bad_parameters_are_refused_by_name(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    async with gateway(tmp_path) as (s, stub):
        code, details = await refused(stub.Generate(request(**wrong)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert said in details
        assert not s.engine.submitted


async def test_images_are_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, stub):
        asked = request()
        asked.mm_inputs.SetInParent()
        code, details = await refused(stub.Generate(asked))
        assert (code, "mm_inputs" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_too_long_prompt_is_invalid(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, stub):
        code, _details = await refused(stub.Generate(request(*[5] * 500)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_abort_ends_the_stream(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        call = stub.Generate(request(stream=True, n=2, temperature=0.5))
        key = await s.engine.next_request()
        s.engine.start(key)
        await stub.Abort(vllm.AbortRequest(request_ids=["r", "unknown"]))
        answers = [a.complete async for a in call]
        assert sorted((end.index, end.finish_reason) for end in answers) == [(0, "abort"), (1, "abort")]
        await s.idle()


async def test_hang_up_cancels(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        call = stub.Generate(request(stream=True))
        key = await s.engine.next_request()
        call.cancel()
        await s.idle()
        assert s.engine.cancelled == [key]


async def test_health_waits_for_the_first_worker(tmp_path: Path) -> None:
    """A gateway that gets an answer asks for the model, which only a worker knows."""
    async with gateway(tmp_path, joined=False) as (s, stub):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.HealthCheck(vllm.HealthCheckRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        s.engine.join()
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
        s.engine.lose()  # its requests wait for the next one
        assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_model_and_server_are_described(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["L"], "bos_token_id": 2}))
    async with gateway(tmp_path, model=folder, model_defaults={"temperature": 0.5}) as (_, stub):
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.max_context_length, info.vocab_size) == (HELLO.max_model_len, HELLO.vocab_size)
        assert (info.model_type, list(info.architectures), info.bos_token_id) == ("llama", ["L"], 2)
        assert list(info.eos_token_ids) == [EOS]
        assert json.loads(info.default_sampling_params_json)["temperature"] == 0.5
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.block_size, server.max_num_seqs) == (HELLO.block_size, HELLO.num_slots)


async def test_loads_count_requests(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (s, stub):
        (load,) = (await stub.GetLoads(vllm.GetLoadsRequest())).loads
        assert (load.num_total_reqs, load.max_running_requests) == (0, HELLO.num_slots)
        assert s.engine.submitted == []


async def test_tokenizer_comes_with_its_digest(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")
    for name in (*names, "model.safetensors"):
        (folder / name).write_text(name * 20_000)
    async with gateway(tmp_path, model=folder) as (_, stub):
        pieces = [piece async for piece in stub.GetTokenizer(common.GetTokenizerRequest())]
        data = b"".join(piece.data for piece in pieces)
        assert [piece.sha256 for piece in pieces] == [""] * (len(pieces) - 1) + [hashlib.sha256(data).hexdigest()]
        archive = zipfile.ZipFile(io.BytesIO(data))
        assert sorted(archive.namelist()) == sorted(names)
        assert archive.read("tokenizer.json") == (folder / "tokenizer.json").read_bytes()


async def test_tokenizer_is_read_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    fails = [OSError(errno.EMFILE, "Too many open files")]

    def read(path: Path) -> bytes:
        if fails:
            raise fails.pop()
        return path.read_text().encode()

    async with gateway(tmp_path, model=folder) as (_, stub):
        monkeypatch.setattr(Path, "read_bytes", read)
        code, _details = await refused(stub.GetTokenizer(common.GetTokenizerRequest()))
        assert code is grpc.StatusCode.INTERNAL
        assert [piece.sha256 async for piece in stub.GetTokenizer(common.GetTokenizerRequest())] != [""]


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_subscribers_look_at_the_cache_one_by_one_beside_the_event_loop(
    tmp_path: Path, is_stopping: bool
) -> None:
    """A look takes seconds with a large cache: other calls go on, and many subscribers are no more work than one."""
    goes_on = threading.Event()
    looking = []

    def chain() -> Iterator[Prefix]:
        looking.append(1)
        assert goes_on.wait(PATIENCE_SECONDS), "the event loop waits for the look"
        assert len(looking) == 1
        looking.pop()
        yield Prefix(b"key-----", b"root", b"\0\0\0\5")

    def prefixes(salt: bytes) -> Future[tuple[bytes, Iterator[Prefix]]]:
        found: Future[tuple[bytes, Iterator[Prefix]]] = Future()
        found.set_result((b"root", chain()))
        return found

    async with gateway(tmp_path) as (s, stub):
        s.engine.prefixes = prefixes
        calls = [stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())]
        await until(lambda: looking)
        calls += [stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()) for _ in range(2)]
        await stub.HealthCheck(vllm.HealthCheckRequest())
        if is_stopping:
            s.manager.refuse(lambda: ServerDraining("stops"))
        goes_on.set()
        for call in calls[: 1 if is_stopping else 3]:
            assert [event.WhichOneof("data") for event in (await call.read()).events] == ["cleared", "stored"]
        if is_stopping:
            assert [await call.read() for call in calls] == [grpc.aio.EOF] * 3, "a look for each delays the end"


def test_large_cache_comes_in_messages_that_grpc_takes() -> None:
    blocks = [Prefix(b"%08d" % number, b"root", b"\x0f\xff\xff\xff" * 256) for number in range(5000)]
    feed = PrefixFeed(7)
    for cached, kind in ((blocks, "stored"), ([], "removed")):
        batches = feed.next_batches(b"root", cached)
        assert max(batch.ByteSize() for batch in batches) < MAX_MESSAGE_BYTES
        events = [event for batch in batches for event in batch.events]
        assert {event.WhichOneof("data") for event in events} - {"cleared"} == {kind}
        names = [block.block_hash for event in events for block in event.stored.blocks]
        names += [name for event in events for name in event.removed.block_hashes]
        assert sorted(names) == sorted(int.from_bytes(block.key, "big") for block in blocks)
    assert batches[-1].sequence_number > 8


async def test_listener_offers_only_its_service_and_needs_the_tokens(tmp_path: Path) -> None:
    async with gateway(tmp_path, token_file=str(token_file(tmp_path, f"alice {ALICE}"))) as (s, stub):
        s.engine.answer = lambda _: [5]
        code, _ = await refused(stub.Generate(request()))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", f"Bearer {ALICE}"),)
        assert [a async for a in stub.Generate(request(), metadata=metadata)]
        async with grpc.aio.insecure_channel(s.server.gateway_address) as channel:
            code, _ = await refused(s.stub_of(channel).Generate(text_request(), metadata=metadata))
            assert code is grpc.StatusCode.UNIMPLEMENTED
