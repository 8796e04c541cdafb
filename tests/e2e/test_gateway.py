"""`--gateway`: the real gateway before the demo model, asked by the packages `openai` and `anthropic`."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import grpc
import openai
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from support.collector import Collector, collector
from support.demo import PROMPTS, model
from support.processes import is_running
from support.service import DEMO_MODEL, Service, running, wait_for
from support.sockets import free_ports
from support.worker_kills import signal_worker

LENGTH, BLOCK_SIZE = 32, 16
SLOTS, QUEUE_SIZE = 4, 2
NAME = "demo"
ASKED: Any = [{"role": "user", "content": "Tell me about the sea."}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0.0}
BOOLEAN: Any = {"type": "boolean"}
TOOL: Any = {
    "name": "switch",
    "parameters": {
        "type": "object",
        "properties": {"on": BOOLEAN},
        "required": ["on"],
        "additionalProperties": False,
    },
}

TEXT, THOUGHT = "The sea is [a-z]{3,9}\\.", "<think>So be it\\.</think>"
TEXT_OF_CALL = '<tool_call>\n\\{"name": "switch", "arguments": \\{"on": (true|false)\\}\\}\n</tool_call>'


@dataclass
class Gateway:
    """A service with a gateway, and a client of each."""

    service: Service
    address: str
    http: str
    traces: Collector

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://{self.http}/v1", api_key="none", max_retries=0)

    def pid(self) -> int:
        """Return the process of the gateway; 0 if there is none."""
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, _, rest = entry.read_text().partition(" (")
            except OSError:  # it has exited
                continue
            name, _, fields = rest.rpartition(") ")
            if name.startswith("smg") and int(fields.split()[1]) == self.service.process.pid:
                return int(pid)
        return 0

    def answers(self) -> bool:
        """Whether it answers: it lists the model before it has the tokenizer."""
        try:
            self.openai().completions.create(prompt="a", max_tokens=1, **GREEDY)
        except openai.APIError:
            return False
        return [found.id for found in self.openai().models.list()] == [NAME]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    address, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    flags = ["--gateway", "--gateway-listen", address, "--gateway-http", http, "--served-model-name", NAME]
    flags += ["--max-batch-size", str(SLOTS), "--max-queue-size", str(QUEUE_SIZE)]
    flags += ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]  # the demo's template shows none
    with collector() as traces, running(*flags, "--otlp-traces-endpoint", traces.address) as service:
        found = Gateway(service, address, http, traces)
        wait_for(found.answers, "the gateway")
        assert service.client.stats().counters.requests_rejected == 0, "its polls count as requests"
        yield found
        wait_for(service.is_idle, "idle at the end")
        pid = found.pid()
        assert is_running(pid)
    assert not is_running(pid), "the gateway outlives the scheduler"


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.openai() as client:
        yield client


def prompt_ids(prompt: str) -> list[int]:
    """Return the tokens of a prompt as the gateway sends them: without special ones."""
    return list(model()[1](prompt, add_special_tokens=False).input_ids)


def own_text(gateway: Gateway, prompt: str) -> str:
    return gateway.service.client.generate(prompt_ids(prompt), temperature=0.0, max_tokens=LENGTH, ignore_eos=True).text


def test_completion_equals_that_of_our_own_client(gateway: Gateway, client: openai.OpenAI) -> None:
    for prompt in PROMPTS[:3]:
        answer = client.completions.create(prompt=prompt, max_tokens=LENGTH, extra_body={"ignore_eos": True}, **GREEDY)
        assert answer.choices[0].text == own_text(gateway, prompt)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == LENGTH


def test_one_trace_has_http_gateway_and_engine(gateway: Gateway, client: openai.OpenAI) -> None:
    trace, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    headers = {"traceparent": f"00-{trace}-{caller}-01"}
    client.completions.create(prompt="a", max_tokens=4, extra_headers=headers, **GREEDY)

    def spans() -> dict[str, Any]:
        found = [span for span in gateway.traces.spans if span.trace_id.hex() == trace]
        return {span.span_id.hex(): span for span in found}

    def path() -> list[str]:
        """Return the names of the spans from that of the decode up to the caller's."""
        names, spans_by_id = list[str](), spans()
        at = next((key for key, span in spans_by_id.items() if span.name == "decode"), "")
        while at in spans_by_id:
            names.append(spans_by_id[at].name)
            at = spans_by_id[at].parent_span_id.hex()
        return [*names, at]

    wanted = ["decode", f"text_completion {NAME}", "grpc_execute", "http_request", caller]
    wait_for(lambda: path() == wanted, "the spans of smg and of the engine")


def test_streamed_chat_equals_a_chat_of_our_own_client(gateway: Gateway, client: openai.OpenAI) -> None:
    own = gateway.service.client.generate(ASKED, temperature=0.0, max_tokens=LENGTH)
    stream = client.chat.completions.create(
        messages=ASKED, max_tokens=LENGTH, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == own.text
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == len(own.token_ids)
    assert pieces[-1].usage.prompt_tokens == own.usage.prompt_tokens


def test_messages_of_anthropic(gateway: Gateway) -> None:
    own = gateway.service.client.generate(ASKED, temperature=0.0, max_tokens=8)
    with anthropic.Anthropic(base_url=f"http://{gateway.http}", api_key="none", max_retries=0) as client:
        answer: Any = client.messages.create(model=NAME, max_tokens=8, messages=ASKED, extra_body={"temperature": 0.0})
    assert answer.content[0].text == own.text
    assert answer.stop_reason == "max_tokens"


def test_two_outputs_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=ASKED, max_tokens=4, n=2, seed=3, logprobs=True, top_logprobs=2
    )
    assert sorted(choice.index for choice in answer.choices) == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 4
        assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_schema_and_forced_tool(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": BOOLEAN}}
    answer = client.chat.completions.create(messages=ASKED, max_tokens=LENGTH, response_format=form, **GREEDY)
    assert (answer.choices[0].message.content or "").strip() in ("true", "false")
    tools: Any = [{"type": "function", "function": TOOL}]
    choice: Any = {"type": "function", "function": {"name": TOOL["name"]}}
    answer = client.chat.completions.create(messages=ASKED, max_tokens=64, tools=tools, tool_choice=choice, **GREEDY)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == TOOL["name"]
    assert json.loads(call.function.arguments)["on"] in (True, False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [TEXT, TEXT_OF_CALL, f"{THOUGHT}{TEXT_OF_CALL}"])
def test_tools_that_the_model_may_call(client: openai.OpenAI, form: str, stream: bool) -> None:
    """The demo model knows no tools, so that a regular expression, which smg passes on, says what it writes."""
    tools: Any = [{"type": "function", "function": TOOL}]
    asked: Any = {"messages": ASKED, "max_tokens": 64, "tools": tools, "tool_choice": "auto", "stream": stream}
    answer: Any = client.chat.completions.create(**asked, **GREEDY, extra_body={"regex": form})
    choices = [part.choices[0] for part in answer if part.choices] if stream else [answer.choices[0]]
    parts = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(part.content or "" for part in parts)
    calls = [call.function for part in parts for call in part.tool_calls or ()]
    if form == TEXT:
        assert re.fullmatch(form, text)
        assert (calls, choices[-1].finish_reason) == ([], "stop")
        return
    assert [call.name for call in calls if call.name] == [TOOL["name"]]
    assert json.loads("".join(call.arguments or "" for call in calls)) in ({"on": True}, {"on": False})
    assert (text, choices[-1].finish_reason) == ("", "tool_calls")
    reasoning = "".join(getattr(part, "reasoning_content", None) or "" for part in parts)
    assert reasoning == ("So be it." if form.startswith(THOUGHT) else "")


def test_embedding_equals_that_of_our_own_client(gateway: Gateway, client: openai.OpenAI) -> None:
    own = gateway.service.client.embed([PROMPTS[0]])
    found = client.embeddings.create(model=NAME, input=PROMPTS[0]).data[0].embedding
    assert found == pytest.approx(own.vectors[0], abs=1e-6)


def test_huge_body_is_413(client: openai.OpenAI) -> None:
    """smg would keep it several times over, and make tokens of it before it finds it too long."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(prompt="a" * 2**22, max_tokens=8, **GREEDY)
    assert caught.value.status_code == 413


def test_too_long_prompt_is_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024"):
        client.completions.create(prompt="a b c " * 2000, max_tokens=8, **GREEDY)


def test_full_queue_is_429(gateway: Gateway, client: openai.OpenAI) -> None:
    service = gateway.service
    ids = [f"fills-{number}" for number in range(SLOTS + QUEUE_SIZE)]
    for count, request_id in enumerate(ids, 1):
        service.client.submit("a", request_id=request_id, max_tokens=900, ignore_eos=True)
        wait_for(lambda: service.client.stats().gauges.num_requests_running == min(count, SLOTS), "a slot")  # noqa: B023
    message = f"{QUEUE_SIZE} requests are waiting, the limit is {QUEUE_SIZE}; retry in about"
    num_rejected = service.client.stats().counters.requests_rejected
    with pytest.raises(openai.RateLimitError, match=message):
        client.completions.create(prompt="a", max_tokens=8, **GREEDY)
    assert service.client.stats().counters.requests_rejected == num_rejected + 1, "smg asks again"
    assert all(service.client.cancel(request_id) for request_id in ids)
    wait_for(service.is_idle, "the cancelled requests to end")


def test_closed_stream_frees_its_blocks(gateway: Gateway, client: openai.OpenAI) -> None:
    with client.chat.completions.create(messages=ASKED, max_tokens=900, stream=True, **GREEDY) as stream:
        next(iter(stream))
    wait_for(gateway.service.is_idle, "the cancelled request to end")


@pytest.mark.exhaustive
def test_killed_worker_changes_no_answer(gateway: Gateway, client: openai.OpenAI) -> None:
    stream = client.completions.create(
        prompt=PROMPTS[0], max_tokens=LENGTH, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    texts = [next(iter(stream)).choices[0].text]
    signal_worker(lambda: gateway.service.worker_pid)
    texts += [piece.choices[0].text for piece in stream if piece.choices]
    assert "".join(texts) == own_text(gateway, PROMPTS[0])


def test_engine_describes_its_load_and_model(gateway: Gateway, client: openai.OpenAI) -> None:
    with grpc.insecure_channel(gateway.address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        with client.chat.completions.create(messages=ASKED, max_tokens=900, stream=True, **GREEDY) as stream:
            next(iter(stream))
            (load,) = stub.GetLoads(vllm.GetLoadsRequest()).loads
            gauges = gateway.service.client.stats().gauges
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 0, 1)
        assert 0 < load.num_used_tokens < load.max_total_num_tokens == gauges.num_blocks * BLOCK_SIZE
        assert load.token_usage == pytest.approx(load.num_used_tokens / load.max_total_num_tokens)
        assert 0 < load.cache_hit_rate < 1
        info = stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert {info.model_path, info.tokenizer_path} == {str(DEMO_MODEL)}
        assert info.is_generation
        server = stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.server_type, server.kv_cache_dtype) == ("vllm-grpc", "auto")
        ids = prompt_ids(PROMPTS[0])
        vector = stub.Embed(vllm.EmbedRequest(tokenized=vllm.TokenizedInput(input_ids=ids)))
        assert (vector.prompt_tokens, vector.embedding_dim) == (len(ids), len(vector.embedding))


def test_prompt_logprobs_equal_those_of_our_own_client(gateway: Gateway) -> None:
    ids = prompt_ids(PROMPTS[0])
    own = gateway.service.client.generate(ids, temperature=0.0, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    params = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    asked = vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=ids), sampling_params=params)
    with grpc.insecure_channel(gateway.address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        (answer,) = stub.Generate(asked)
    found = [entry.value for entry in answer.complete.input_logprobs.token_logprobs]
    assert own is not None
    assert found == pytest.approx([entry.logprob for entry in own], abs=1e-5)


def test_prefix_cache_is_told(gateway: Gateway, client: openai.OpenAI) -> None:
    with grpc.insecure_channel(gateway.address) as channel:
        stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        stub.FlushCache(common.FlushCacheRequest())
        events = stub.SubscribeKvEvents(common.SubscribeKvEventsRequest())
        first = next(events)
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        client.completions.create(prompt=PROMPTS[0] * 8, max_tokens=2, **GREEDY)
        stored = next(events).events[0].stored
        expected = prompt_ids(PROMPTS[0] * 8)
        assert list(stored.blocks[0].token_ids) == expected[: stored.blocks[0].block_size]
        assert not stored.HasField("parent_block_hash")
        stub.FlushCache(common.FlushCacheRequest())
        assert stored.blocks[0].block_hash in next(events).events[0].removed.block_hashes
        events.cancel()


def test_gateway_listens_on_loopback_only(gateway: Gateway) -> None:
    sockets = [os.readlink(entry) for entry in Path(f"/proc/{gateway.pid()}/fd").iterdir()]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    hosts = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    assert hosts == ["0100007F"] * 2, "HTTP and smg's metrics"


def test_killed_gateway_comes_back(gateway: Gateway) -> None:
    killed = gateway.pid()
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: gateway.pid() not in (0, killed) and gateway.answers(), "another gateway")


def test_stream_of_a_stopping_server_ends_whole(capfd: pytest.CaptureFixture[str]) -> None:
    http = f"127.0.0.1:{free_ports(1)[0]}"
    flags = ["--gateway", "--gateway-http", http, "--served-model-name", NAME]
    with running(*flags, "--log-level", "info", "--log-format", "json") as service:
        found = Gateway(service, "", http, Collector())
        wait_for(found.answers, "the gateway")
        expected = own_text(found, PROMPTS[0])
        stream = found.openai().completions.create(
            prompt=PROMPTS[0], max_tokens=LENGTH, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        texts = [next(iter(stream)).choices[0].text]
        service.process.terminate()
        texts += [piece.choices[0].text for piece in stream if piece.choices]
        assert "".join(texts) == expected
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [event["exit_code"] for event in events if event["event"] == "gateway_stopped"] == [0], "smg is killed"
