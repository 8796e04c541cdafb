"""HTTP server for Prometheus: prometheus_client's page on the threading server of wsgiref."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import parse_address

MAX_CONNECTIONS = 16


class _Handler(WSGIRequestHandler):
    timeout = 5.0  # seconds for each read of the request, and for the write of the response

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()  # wsgiref prints a traceback for a client that does not read


class MetricsServer(ThreadingWSGIServer, Collector):
    """Serves the metrics of `collect` until `close`, with a thread for each of at most MAX_CONNECTIONS.

    Of too many connections the oldest is closed, so slow clients do not keep others away.
    """

    request_queue_size = 64  # connections that wait to be accepted

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Listen on `address`, a host:port. Raises ConfigurationError if that fails. `collect` may raise."""
        parsed = parse_address(address)
        assert not isinstance(parsed, str), "the settings accept only host:port"
        self.address_family = socket.AF_INET6 if ":" in parsed[0] else socket.AF_INET
        try:
            super().__init__((parsed[0].strip("[]"), parsed[1]), _Handler)
        except OSError:
            raise ConfigurationError(f"cannot listen on {address}: in use, or not an address of this machine") from None
        self.address = f"{address.rpartition(':')[0]}:{self.server_port}"
        self._collect = collect
        self._collecting = threading.Lock()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        registry = CollectorRegistry()
        registry.register(self)
        self._page = make_wsgi_app(registry, disable_compression=True)
        self.set_app(self._answer)
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the registry calls it."""
        yield from self._collect()

    def close(self) -> None:
        """Stop answering, soon. Any thread; does not wait."""
        threading.Thread(target=self.shutdown, daemon=True).start()

    def _serve(self) -> None:
        with self:
            self.serve_forever()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        # Always the text format 0.0.4, which every release of Prometheus reads: OpenMetrics has no colons in names.
        environ["HTTP_ACCEPT"] = "text/plain; version=0.0.4"
        try:
            with self._collecting:
                return list(self._page(environ, start_response))
        except Exception:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the engine did not answer in time\n"]

    def server_bind(self) -> None:
        """Bind without the name look-up of HTTPServer, which waits for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Reserve a thread for the connection. If all are busy, close the oldest connection and take its thread."""
        if self._free.acquire(blocking=False):
            return True
        with contextlib.suppress(StopIteration, OSError):
            next(iter(self._connections)).shutdown(socket.SHUT_RDWR)
        return self._free.acquire(timeout=_Handler.timeout)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, at the end of its thread."""
        super().shutdown_request(request)
        if self._connections.pop(request, request) is None:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or is too slow."""
