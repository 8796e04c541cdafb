"""A small HTTP listener with a thread for each of a bounded number of connections, on wsgiref and socketserver.

Of too many connections the oldest is closed, so slow clients do not keep others away. A connection that `keep` protects
is not closed for a newer one.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client.exposition import ThreadingWSGIServer

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import parse_address

SOCKET_KEY = "lineclear.socket"
"""The connection in the environ of a request, for `keep`."""


class Handler(WSGIRequestHandler):
    """Reads a request and writes the response, without a log."""

    timeout = 5.0  # seconds for each read of the request, and for each write of the response

    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | {SOCKET_KEY: self.connection}

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def get_stderr(self) -> Any:
        return io.StringIO()  # wsgiref prints a traceback for a client that does not read


class HttpListener(ThreadingWSGIServer):
    """Serves a WSGI application until `close`, at most `max_connections` at a time."""

    request_queue_size = 64  # connections that wait to be accepted

    def __init__(
        self, address: str, name: str, max_connections: int, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """Listen on `address`, a host:port. Raises ConfigurationError if that fails. Call `serve` then.

        `tls()` returns the context of the next connection; without it, the listener is plain HTTP.
        """
        parsed = parse_address(address)
        assert not isinstance(parsed, str), "the settings accept only host:port"
        self.address_family = socket.AF_INET6 if ":" in parsed[0] else socket.AF_INET
        try:
            super().__init__((parsed[0].strip("[]"), parsed[1]), Handler)
        except OSError:
            raise ConfigurationError(f"cannot listen on {address}: in use, or not an address of this machine") from None
        self.address = f"{address.rpartition(':')[0]}:{self.server_port}"
        self._name, self._tls = name, tls
        self._free = threading.BoundedSemaphore(max_connections)
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._kept: dict[socket.socket, None] = {}

    def serve(self, application: Callable[..., Iterable[bytes]]) -> None:
        """Start to answer requests with the application, on threads."""
        self.set_app(application)
        threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def keep(self, connection: socket.socket) -> None:
        """Do not close this connection for a newer one."""
        self._kept[connection] = None
        self._connections.pop(connection, None)

    def close(self) -> None:
        """Stop answering, soon. Any thread; does not wait."""
        threading.Thread(target=self.shutdown, daemon=True).start()

    def _serve(self) -> None:
        with self:
            self.serve_forever()

    def server_bind(self) -> None:
        """Bind without the name look-up of HTTPServer, which waits for DNS."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The TLS handshake is left to the connection's thread."""
        connection, address = super().get_request()
        if self._tls is None:
            return connection, address
        try:
            return self._tls().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address
        except OSError:  # the peer has gone, or no descriptor is left for the certificates
            connection.close()
            raise

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer the requests of a connection, after its handshake."""
        if isinstance(request, ssl.SSLSocket):
            request.settimeout(Handler.timeout)
            request.do_handshake()
        super().finish_request(request, client_address)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Reserve a thread for the connection. If all are busy, close the oldest connection and take its thread."""
        if self._free.acquire(blocking=False):
            return True
        with contextlib.suppress(StopIteration, OSError):
            # Not SSLSocket.shutdown, which lets the connection's thread go on in plaintext.
            socket.socket.shutdown(next(iter(self._connections)), socket.SHUT_RDWR)
        return self._free.acquire(timeout=Handler.timeout)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection."""
        self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, at the end of its thread."""
        super().shutdown_request(request)
        was_open = self._connections.pop(request, request) is None
        if self._kept.pop(request, request) is None or was_open:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client has gone, or is too slow."""
