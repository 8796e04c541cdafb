"""Traces by OTLP: a span of each request, made at its end from what its log line is made of.

The packages are an extra: nothing imports this module without `--otlp-traces-endpoint`. Names follow OpenTelemetry's
semantic conventions for generative AI; what they lack begins with `lineclear.`. A span has no content. Sampler, batches
and headers are settings of the SDK (OTEL_TRACES_SAMPLER, OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import structlog
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from lineclear.extras import installed_version
from lineclear.process.exception_location import exception_fields
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.requests.request_context import RequestContext
from lineclear.scheduler.requests.request_metrics import EndedRequest
from lineclear.scheduler.security.identity import TRACE_KEYS

log = structlog.get_logger()

_SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
# The codes for which the conventions make the span of a server an error; the others are mistakes of the caller.
_ERRORS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
_STOPS = {FinishReason.STOP_EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING}


class Tracer:
    """Sends spans to the collector at `endpoint` from a thread. Spans that it cannot take are dropped."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(endpoint)))
        self._tracer = self._provider.get_tracer("lineclear", installed_version())
        self._propagator = TraceContextTextMapPropagator()
        self._has_failed = False

    def add(self, request: RequestContext, ended: EndedRequest) -> None:
        """Record the span of a request that has ended, and those of its phases. Never raises."""
        try:
            self._add(request, ended)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                log.error("spans_not_made", **exception_fields(error))

    def close(self, timeout_seconds: float) -> None:
        """Send what is recorded, for at most `timeout_seconds`."""
        thread = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        thread.start()
        thread.join(timeout_seconds)

    def _add(self, request: RequestContext, ended: EndedRequest) -> None:
        now, now_ns = request.services.clock(), round(datetime.now(UTC).timestamp() * 1e9)
        arrival, end = request.call.arrival, request.call.arrival + ended.timings.e2e_latency

        def wall_ns(at: float) -> int:
            return now_ns - round((now - at) * 1e9)

        operation, model = _operation(request), request.call.bounds.model
        span = self._tracer.start_span(
            f"{operation} {model}",
            self._propagator.extract(dict(zip(TRACE_KEYS, request.trace, strict=True))),
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, "gen_ai.request.model": model},
            start_time=wall_ns(arrival),
        )
        if span.is_recording():
            span.set_attributes(dict(_attributes(request, ended)))
            if ended.code in _ERRORS:
                span.set_status(StatusCode.ERROR, ended.outcome)
            for name, at, count in _interruptions(ended, end):
                span.add_event(name, {"lineclear.count": count}, wall_ns(at))
            parent = set_span_in_context(span)
            for name, start, stop in _phases(ended, arrival, end):
                self._tracer.start_span(name, parent, start_time=wall_ns(start)).end(wall_ns(stop))
        span.end(wall_ns(end))


class _Exporter(OTLPSpanExporter):
    """Logs the first failure of each time that the collector is away, in place of the SDK, which logs each one."""

    def __init__(self, endpoint: str) -> None:
        self._problem = _LastMessage()
        logger = logging.getLogger("opentelemetry")
        logger.handlers, logger.propagate = [self._problem], False
        self._is_away = False
        super().__init__(endpoint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        was_away, self._is_away = self._is_away, result is not SpanExportResult.SUCCESS
        if self._is_away and not was_away:
            log.warning("traces_not_exported", num_spans=len(spans), problem=self._problem.text)
        return result


class _LastMessage(logging.Handler):
    """Keeps the last warning of a logger."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.text = record.getMessage()


def _resource() -> Resource:
    """Return what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say, and what they leave out."""
    given = Resource.create()
    own = {"service.version": installed_version()}
    if str(given.attributes["service.name"]).startswith("unknown_service"):
        own["service.name"] = "lineclear"
    return given.merge(Resource(own))


def _operation(request: RequestContext) -> str:
    if request.chat_time_us:
        return "chat"
    return "embeddings" if request.outputs[0].vector else "text_completion"


def _attributes(request: RequestContext, ended: EndedRequest) -> Iterator[tuple[str, Any]]:
    sampling, stats = request.validated.sampling, ended.stats
    yield "gen_ai.provider.name", "lineclear"
    yield "gen_ai.response.id", ended.request_id
    yield "gen_ai.response.model", request.call.bounds.model
    yield "gen_ai.response.finish_reasons", [_word(reason) for reason in request.reasons if reason is not None]
    yield "gen_ai.usage.input_tokens", request.shape.prompt_tokens
    yield "gen_ai.usage.output_tokens", ended.num_tokens
    yield "rpc.response.status_code", ended.code
    yield "lineclear.outcome", ended.outcome
    if request.shape.max_tokens:  # it generates
        yield "gen_ai.request.max_tokens", request.shape.max_tokens
        yield from ((f"gen_ai.request.{name}", getattr(sampling, name)) for name in _SAMPLING)
    if ended.num_outputs > 1:
        yield "gen_ai.request.choice.count", ended.num_outputs
    if ended.code != "OK":
        yield "error.type", ended.outcome
    if ended.tenant:
        yield "lineclear.tenant", ended.tenant
    if ended.timings.time_to_first_token is not None:
        yield "gen_ai.response.time_to_first_chunk", ended.timings.time_to_first_token
    if stats is not None:
        yield "gen_ai.usage.cache_read.input_tokens", stats.cached_tokens
        yield "lineclear.recomputed_tokens", stats.recomputed_tokens


def _word(reason: FinishReason) -> str:
    return "stop" if reason in _STOPS else reason.name.lower()


def _phases(ended: EndedRequest, arrival: float, end: float) -> Iterator[tuple[str, float, float]]:
    """Yield the phases that a request reached: name, start and end. The last one lasts until the next, or the end."""
    if (stats := ended.stats) is None:
        return
    started, first, last = stats.started_at, stats.first_token_at, stats.last_token_at
    yield "queue", arrival, end if started is None else started
    if started is not None:
        yield "prefill", started, end if first is None else first
    if first is not None and last is not None:
        yield "decode", first, last


def _interruptions(ended: EndedRequest, end: float) -> Iterator[tuple[str, float, int]]:
    """Yield how often a request was interrupted, with the time at which it last ran again, or its end."""
    if (stats := ended.stats) is not None:
        at = end if stats.resumed_at is None else stats.resumed_at
        for name, count in (("preempted", stats.preemptions), ("recovered", stats.recoveries)):
            if count:
                yield name, at, count
