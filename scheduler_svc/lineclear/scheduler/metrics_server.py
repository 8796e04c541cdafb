"""HTTP server for Prometheus: prometheus_client's page on a bounded listener."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lineclear.scheduler.http_listener import HttpListener

MAX_CONNECTIONS = 16


class MetricsServer(HttpListener, Collector):
    """Serves the metrics of `collect` until `close`, with a thread for each of at most MAX_CONNECTIONS."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Listen on `address`, a host:port. Raises ConfigurationError if that fails. `collect` may raise."""
        super().__init__(address, "metrics", MAX_CONNECTIONS)
        self._collect = collect
        self._collecting = threading.Lock()
        registry = CollectorRegistry()
        registry.register(self)
        self._page = make_wsgi_app(registry, disable_compression=True)
        self.serve(self._answer)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls it."""
        yield from self._collect()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # Always the text format 0.0.4, which every release of Prometheus reads: OpenMetrics has no colons in names.
        environ["HTTP_ACCEPT"] = "text/plain; version=0.0.4"
        try:
            with self._collecting:
                return list(self._page(environ, start_response))
        except Exception:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the engine did not answer in time\n"]
