"""A TCP proxy that can stop forwarding without closing a connection, as when a machine or a cable fails.

The kernel still accepts bytes for both ends, so neither end gets an error or the end of the stream.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

_CHUNK_BYTES = 65536


class BlackHole:
    """Forward each connection to `target` (host:port) to `upstream`, until `vanish` is called."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._vanished = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self.run, name="black-hole", daemon=True)
        self._thread.start()

    def vanish(self) -> None:
        """Stop forwarding in both directions. Nothing is forwarded after the return."""
        self._vanished.set()
        self._wake.send(b"x")
        self._thread.join()

    def close(self) -> None:
        self.vanish()
        for sock in (*self._sockets, self._listener, self._wake, self._woken):
            sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(self._woken, selectors.EVENT_READ, None)
            while not self._vanished.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        near, far = self._listener.accept()[0], socket.create_connection(self._upstream)
                        self._sockets += [near, far]
                        selector.register(near, selectors.EVENT_READ, far)
                        selector.register(far, selectors.EVENT_READ, near)
                    elif key.data is not None:
                        self._pass(selector, key.fileobj, key.data)

    def _pass(self, selector: selectors.BaseSelector, source: socket.socket, sink: socket.socket) -> None:  # type: ignore[override]
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(_CHUNK_BYTES)
            sink.sendall(data)
        if not data:
            selector.unregister(source)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)
