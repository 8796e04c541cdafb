"""The listener that Prometheus fetches figures from, plain HTTP on its own address. What they say is in `metrics`.

One caller after the other, on one thread, a few seconds each: whoever can reach it can keep others from the figures,
but nothing else.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from lineclear.scheduler.addresses import parse_address
from lineclear.scheduler.settings import ConfigurationError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_SILENT_SECONDS = 5.0
_POLL_SECONDS = 0.5  # how long `close` may wait for a thread with nothing to do


class Scrapes(Collector):
    """Answers from the moment it is made until `close`. `collect` is called on its thread and may raise."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Raises ConfigurationError where `address`, a host:port, cannot be listened on."""
        self._collect = collect
        registry = CollectorRegistry()
        registry.register(self)
        self._page = make_wsgi_app(registry)
        parsed = parse_address(address)
        assert not isinstance(parsed, str), "the settings let only host:port through"
        host, port = parsed[0].strip("[]"), parsed[1]
        try:
            self._server = (_Six if ":" in host else _Server)((host, port), _Handler)
        except OSError:
            raise ConfigurationError(f"cannot listen on {address}: in use, or not an address of this machine") from None
        self._server.set_app(self._answer)
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="scrapes", daemon=True
        )
        self._thread.start()

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        yield from self._collect()

    def close(self) -> None:
        """Stop answering. Not from the thread that `collect` waits for."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        try:
            page: Iterable[bytes] = self._page(environ, start_response)
            return page
        except Exception:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the figures did not come in time\n"]


class _Server(WSGIServer):
    def server_bind(self) -> None:
        """Without asking the network for our name, as the library's would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that left or kept silent is no error of ours."""


class _Six(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every few seconds is no news."""
