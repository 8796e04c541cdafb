"""A receiver of OTLP traces over gRPC, as a collector has: it keeps the spans that it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans and the attributes of their resources."""

    def __init__(self) -> None:
        self.address = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def Export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        for group in request.resource_spans:
            self.resources.append(values(group.resource.attributes))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    @property
    def roots(self) -> list[Any]:
        """The spans of requests."""
        return [span for span in self.spans if span.kind == span.SPAN_KIND_SERVER]

    def phases(self, root: Any) -> list[Any]:
        """Return the spans below that of a request, by their start."""
        found = [span for span in self.spans if span.parent_span_id == root.span_id]
        return sorted(found, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano))


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a free port."""
    found, server = Collector(), grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(found, server)  # type: ignore[no-untyped-call]
    found.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield found
    finally:
        server.stop(0).wait()


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dictionary."""
    return {entry.key: _value(entry.value) for entry in attributes}


def _value(value: Any) -> Any:
    if value.WhichOneof("value") == "array_value":
        return [_value(entry) for entry in value.array_value.values]
    return getattr(value, value.WhichOneof("value"))
