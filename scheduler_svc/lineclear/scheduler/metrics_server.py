"""The listener that Prometheus fetches figures from: plain HTTP on its own address, thread and event loop.

Each connection has one request, and a few seconds for it. Of too many connections the oldest is closed, so slow callers
do not keep others away. The page is always in Prometheus' text format 0.0.4, which every release of it reads: in
OpenMetrics the client library changes the colon in the names that vLLM has.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.addresses import parse_address

REQUEST_SECONDS = 5.0
"""For a request and its answer together."""
MAX_CONNECTIONS = 16
_MAX_HEAD_BYTES = 16 * 1024


class MetricsServer(Collector):
    """Answers from the moment it is made until `close`. `collect` is called on its thread and may raise."""

    def __init__(self, address: str, collect: Callable[[], Iterable[Metric]]) -> None:
        """Raises ConfigurationError where `address`, a host:port, cannot be listened on."""
        self._collect = collect
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._connections: dict[asyncio.Task[None], None] = {}  # the oldest first
        parsed = parse_address(address)
        assert not isinstance(parsed, str), "the settings let only host:port through"
        host, port = parsed[0].strip("[]"), parsed[1]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family)
        except OSError:
            raise ConfigurationError(f"cannot listen on {address}: in use, or not an address of this machine") from None
        self.address = f"{address.rpartition(':')[0]}:{self._socket.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._closed = asyncio.Event()
        # A daemon, and never joined: whatever a caller does, the process can exit.
        threading.Thread(target=self._run, name="scrapes", daemon=True).start()

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        yield from self._collect()

    def close(self) -> None:
        """Stop answering, soon. Any thread; does not wait."""
        with contextlib.suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(self._closed.set)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._socket, limit=_MAX_HEAD_BYTES)
        await self._closed.wait()
        server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= MAX_CONNECTIONS:
            next(iter(self._connections)).cancel()
        self._connections[task] = None
        try:
            # OSError: the caller has gone. The others: it sent no request, or not in time. None is worth a log line.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass  # closed in favour of another connection, or of the exit
        finally:
            del self._connections[task]
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status, body = self._page(head.split(b"\r\n", 1)[0].decode("latin-1").split(" "))
        fields = {"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, "Content-Length": str(len(body)), "Connection": "close"}
        lines = [f"HTTP/1.1 {status} {status.phrase}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        writer.transport.set_write_buffer_limits(high=0)  # drain waits until all is handed to the kernel
        writer.write("\r\n".join(lines).encode("latin-1") + (b"" if head.startswith(b"HEAD ") else body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    def _page(self, request: list[str]) -> tuple[HTTPStatus, bytes]:
        if len(request) != 3 or not request[2].startswith("HTTP/1."):
            return HTTPStatus.BAD_REQUEST, b"this is an HTTP/1.1 address for Prometheus\n"
        if request[0] not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, b"GET is answered\n"
        names = parse_qs(urlsplit(request[1]).query).get("name[]")
        try:
            return HTTPStatus.OK, generate_latest(
                self._registry.restricted_registry(names) if names else self._registry
            )
        except Exception:
            return HTTPStatus.SERVICE_UNAVAILABLE, b"the figures did not come in time\n"
