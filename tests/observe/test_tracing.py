"""Traces: what a collector gets of requests, and that a request does not depend on it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from structlog.testing import capture_logs
from support.collector import Collector, collector, values
from support.serving import EOS, HELLO_IDS, Serving, error_of, read_all, serving, text_request
from support.session_driver import Caller, submit
from support.sockets import free_ports
from support.time_limits import SOON_SECONDS
from support.toy_service import toy_service
from support.waiting import eventually
from support.worker_kills import signal_worker

from lineclear.client import AsyncClient, Client
from lineclear.errors import InternalError
from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler import main
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.settings import SchedulerSettings
from lineclear.scheduler.tracing import Tracer
from lineclear.v1 import inference_pb2 as pb

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = (("traceparent", f"00-{TRACE}-{PARENT}-01"), ("tracestate", "shop=7"), ("x-tenant-id", "shop"))
CHAT = pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="Hello")]))


class Traced:
    """A server whose spans a collector gets."""

    def __init__(self, serving: Serving, tracer: Tracer, found: Collector) -> None:
        self.serving, self.engine = serving, serving.engine
        self._tracer, self._found = tracer, found

    async def spans(self) -> Collector:
        """Return the collector once it has the spans of all requests. Later requests have none."""
        await self.serving.idle()
        await asyncio.to_thread(self._tracer.close, SOON_SECONDS)
        return self._found


@contextlib.asynccontextmanager
async def traced(path: Path, **settings: Any) -> AsyncIterator[Traced]:
    with collector() as found:
        async with serving(path, **settings) as s:
            tracer = Tracer(found.address)
            s.manager.requests.on_ended = tracer.add
            yield Traced(s, tracer, found)
            await asyncio.to_thread(tracer.close, SOON_SECONDS)


async def test_span_has_parent_phases_and_figures(tmp_path: Path) -> None:
    async with traced(tmp_path) as t:
        before = time.time_ns()
        call = t.serving.generate(text_request("a secret"), metadata=TRACED)
        key = await t.engine.next_request()
        for act in (
            lambda: t.engine.start(key, 3),
            lambda: t.engine.tokens(key, [5]),
            lambda: t.engine.tokens(key, [6]),
        ):
            await asyncio.sleep(0.02)
            act()
        t.engine.finish_by(key, FinishReason.STOP_EOS, EOS)
        await read_all(call)
        found = await t.spans()
        (root,) = found.roots
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "shop=7")
        assert root.name == "text_completion test-model"
        assert {span.trace_id.hex() for span in found.spans} == {TRACE}
        assert [span.name for span in found.phases(root)] == ["queue", "prefill", "decode"]
        queue, prefill, decode = found.phases(root)
        times = [root.start_time_unix_nano, queue.end_time_unix_nano, prefill.end_time_unix_nano]
        times += [decode.end_time_unix_nano, root.end_time_unix_nano]
        assert min(after - earlier for earlier, after in pairwise(times[:4])) >= 15e6
        assert before <= root.start_time_unix_nano <= times[-2] <= times[-1] <= time.time_ns()
        assert queue.start_time_unix_nano == root.start_time_unix_nano
        assert (prefill.start_time_unix_nano, decode.start_time_unix_nano) == (times[1], times[2])
        figures = values(root.attributes)
        assert figures.pop("gen_ai.response.time_to_first_chunk") >= 0.03
        assert figures.pop("gen_ai.response.id")
        assert figures == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "lineclear",
            "gen_ai.request.model": "test-model",
            "gen_ai.response.model": "test-model",
            "gen_ai.request.max_tokens": 120,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.response.finish_reasons": ["stop"],
            "gen_ai.usage.input_tokens": 8,
            "gen_ai.usage.output_tokens": 2,
            "gen_ai.usage.cache_read.input_tokens": 3,
            "rpc.response.status_code": "OK",
            "lineclear.outcome": "stop_eos",
            "lineclear.recomputed_tokens": 0,
            "lineclear.tenant": "shop",
        }
        assert found.resources[0]["service.name"] == "lineclear"
        assert "secret" not in str(found.spans)


@pytest.mark.parametrize("kind", ["session", "submit", "gateway", "embed", "chat"])
async def test_every_way_of_a_request_has_the_trace_of_its_call(tmp_path: Path, kind: str) -> None:
    async with traced(tmp_path, gateway_listen="127.0.0.1:0") as t:
        t.engine.answer = lambda request: [5]
        if kind == "session":
            caller = Caller(t.serving, metadata=TRACED)
            await caller.send(submit(1))
            await caller.until(lambda: 1 in caller.finished)
        elif kind == "submit":
            await t.serving.stub.Submit(pb.SubmitRequest(request=text_request()), metadata=TRACED)
        elif kind == "gateway":
            async with grpc.aio.insecure_channel(t.serving.server.gateway_address) as channel:
                request = vllm.GenerateRequest(request_id="r", tokenized=vllm.TokenizedInput(input_ids=HELLO_IDS))
                assert [
                    _ async for _ in vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, metadata=TRACED)
                ]
        elif kind == "embed":
            t.engine.answer = None
            call = asyncio.ensure_future(
                t.serving.stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")]), metadata=TRACED)
            )
            key = await t.engine.next_request()
            t.engine.start(key)
            t.engine.fail(key, InternalError("no"))
            assert (await error_of(call)).reason == "INTERNAL_ERROR"
        else:
            await read_all(t.serving.generate(CHAT, metadata=TRACED))
        (root,) = (await t.spans()).roots
        assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
        operation = "chat" if kind == "chat" else "text_completion"
        assert values(root.attributes)["gen_ai.operation.name"] == operation


@pytest.mark.parametrize(
    ("metadata", "count"),
    [((), 1), ((("traceparent", f"00-{TRACE}-{PARENT}-00"),), 0), ((("traceparent", "no"),), 1)],
    ids=["no trace", "not sampled", "malformed"],
)
async def test_decision_of_the_caller_is_kept(tmp_path: Path, metadata: Any, count: int) -> None:
    async with traced(tmp_path) as t:
        t.engine.answer = lambda request: [5]
        await read_all(t.serving.generate(metadata=metadata))
        found = await t.spans()
        assert len(found.roots) == count
        assert TRACE not in [root.trace_id.hex() for root in found.roots]


async def test_sampler_of_the_sdk_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    async with traced(tmp_path) as t:
        t.engine.answer = lambda request: [5]
        await read_all(t.serving.generate(metadata=TRACED))
        assert (await t.spans()).spans == []


async def test_errors_of_the_server_are_errors_of_its_span(tmp_path: Path) -> None:
    """Those of the caller have their code, and no error status."""
    async with traced(tmp_path) as t:
        late = t.serving.generate(timeout=0.2)
        assert (await error_of(late)).reason == "DEADLINE_EXCEEDED"
        left = t.serving.generate()
        t.engine.start(await t.engine.next_request(2))
        left.cancel()
        found = await t.spans()
        expired, cancelled = sorted(found.roots, key=lambda root: root.start_time_unix_nano)
        assert expired.status.code == expired.status.STATUS_CODE_ERROR
        assert cancelled.status.code == cancelled.status.STATUS_CODE_UNSET
        for root, code in ((expired, "DEADLINE_EXCEEDED"), (cancelled, "CANCELLED")):
            figures = values(root.attributes)
            assert (figures["rpc.response.status_code"], figures["error.type"]) == (code, code.lower())
            assert figures["gen_ai.response.finish_reasons"] == []


async def test_absent_collector_is_logged_once_and_disturbs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    (port,) = free_ports(1)
    async with serving(tmp_path) as s:
        with capture_logs() as lines:
            tracer = Tracer(f"http://127.0.0.1:{port}")
            s.manager.requests.on_ended = tracer.add
            s.engine.answer = lambda request: [5]
            for _ in range(3):
                assert await read_all(s.generate(metadata=TRACED))
                await asyncio.to_thread(tracer._provider.force_flush)
            await asyncio.to_thread(tracer.close, SOON_SECONDS)
        (line,) = [line for line in lines if line["event"] == "traces_not_exported"]
        assert "UNAVAILABLE" in line["problem"]
        assert [line["outcome"] for line in lines if line["event"] == "request_ended"] == ["length"] * 3


async def test_bug_in_a_span_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(tmp_path) as t:
        t.engine.answer = lambda request: [5]
        monkeypatch.setattr(Tracer, "_add", lambda *_: 1 / 0)
        with capture_logs() as lines:
            for _ in range(2):
                assert await read_all(t.serving.generate())
        assert [line["error"] for line in lines if line["event"] == "spans_not_made"] == ["ZeroDivisionError"]
        assert len(t.serving.manager.requests) == 0


@pytest.fixture
def active_span() -> Iterator[str]:
    """Run the test in a span of OpenTelemetry, and return its id."""
    with TracerProvider().get_tracer("test").start_as_current_span("work") as span:
        yield f"{span.get_span_context().span_id:016x}"


@pytest.mark.parametrize("kind", ["asyncio", "threads"])
async def test_client_passes_on_the_active_span(tmp_path: Path, active_span: str, kind: str) -> None:
    """Concurrent calls of several spans share no Session, and metadata of the caller comes first."""
    async with traced(tmp_path) as t:
        t.engine.answer = lambda request: [5]
        address, own = t.serving.server.address, {"traceparent": TRACED[0][1]}
        if kind == "asyncio":
            async with AsyncClient(address) as client:
                await asyncio.gather(client.generate("a"), client.generate("a"), client.generate("a", metadata=own))
        else:
            with Client(address) as threaded:
                await asyncio.to_thread(threaded.generate, "a")
                await asyncio.to_thread(threaded.generate, "a", metadata=own)
        found = await t.spans()
        parents = sorted(root.parent_span_id.hex() for root in found.roots)
        assert parents == sorted([active_span] * (2 if kind == "asyncio" else 1) + [PARENT])


def test_client_without_a_span_adds_nothing() -> None:
    assert not trace.get_current_span().get_span_context().is_valid
    client = Client("unix:/nowhere")
    assert client._config.outgoing("a").metadata == ()


def test_setting_without_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SchedulerSettings(model="m", otlp_traces_endpoint="http://127.0.0.1:4317")
    monkeypatch.setattr(main, "is_installed", lambda package: "opentelemetry" not in package)
    with pytest.raises(ConfigurationError, match=r"--otlp-traces-endpoint needs .*opentelemetry-exporter.*\[tracing\]"):
        main._check_packages(settings)


def events(span: Any) -> Sequence[str]:
    return [event.name for event in span.events]


def test_span_of_a_request_over_a_killed_worker(tmp_path: Path) -> None:
    """Real processes: the span says that its request was recovered, and when it ran again."""
    with (
        collector() as found,
        toy_service(
            tmp_path, "--otlp-traces-endpoint", found.address, min_step_seconds=0.005, max_step_seconds=0.01
        ) as s,
        Client(s.target, metadata={"traceparent": TRACED[0][1]}) as client,
    ):
        with client.stream("Hello", max_tokens=100, ignore_eos=True) as stream:
            for delta in stream:
                if delta.first_index == 10:
                    signal_worker(lambda: client.stats().worker.pid)
        assert stream.result.timings.recoveries == 1
        assert s.stop() == 0
        eventually(lambda: len(found.roots) == 1, what="the span")
        (root,) = found.roots
        assert (root.trace_id.hex(), events(root)) == (TRACE, ["recovered"])
        (recovered,), decode = root.events, found.phases(root)[-1]
        assert decode.start_time_unix_nano < recovered.time_unix_nano < decode.end_time_unix_nano
        assert values(recovered.attributes) == {"lineclear.count": 1}
