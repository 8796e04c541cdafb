"""A raw HTTP/2 client for behaviour that no gRPC client has: incomplete requests and endless pings."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Self

from support.time_limits import PATIENCE_SECONDS

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_HEADERS = 4
_ACK = 1
_MAX_FRAME_BYTES = 16_384
_INITIAL_WINDOW = 65_535


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def message(data: bytes, declared: int | None = None) -> bytes:
    """Return a gRPC message with its prefix; `declared` is the length in the prefix."""
    return b"\0" + (len(data) if declared is None else declared).to_bytes(4, "big") + data


class Connection:
    """A connection to a Unix socket or a local port. It respects the flow control windows of the server and counts
    the bytes that it sends.
    """

    def __init__(self, where: Path | int) -> None:
        self._socket = socket.socket(socket.AF_UNIX if isinstance(where, Path) else socket.AF_INET)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._socket.connect(str(where) if isinstance(where, Path) else ("127.0.0.1", where))
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS))
        self._window = self._initial = _INITIAL_WINDOW
        self._windows: dict[int, int] = {}
        self._unsent: dict[int, bytes] = {}
        self._received = b""
        self.sent: dict[int, int] = {}
        """Bytes of messages sent on each stream."""
        self.ended: dict[int, bytes] = {}
        """Payload of the frame that ended each stream."""
        self.goaway = b""
        self.is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close()

    def call(self, method: str, body: bytes, *metadata: tuple[str, str]) -> int:
        """Start a call that sends `body` and never closes its side. Return the number of its stream."""
        stream = 2 * len(self._windows) + 1
        self._windows[stream] = self._initial
        fields = (
            (":path", method),
            (":authority", "x"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            *metadata,
        )
        headers = bytes([0x83, 0x86]) + b"".join(_literal(name, value) for name, value in fields)  # POST, http
        self._socket.sendall(frame(HEADERS, headers, END_HEADERS, stream))
        self._unsent[stream] = body
        self.sent[stream] = 0
        self._send()
        return stream

    @property
    def num_sent(self) -> int:
        """Bytes of messages sent on streams that have not ended."""
        return sum(count for stream, count in self.sent.items() if stream not in self.ended)

    def send_more(self, stream: int, body: bytes) -> None:
        self._unsent[stream] = self._unsent.get(stream, b"") + body
        self._send()

    def ping(self) -> None:
        try:
            self._socket.sendall(frame(PING, bytes(8)))
        except (BrokenPipeError, ConnectionResetError):
            self.is_closed = True

    def receive(self, seconds: float = PATIENCE_SECONDS) -> bool:
        """Receive for at most `seconds`, then send what the windows allow. Return whether anything was received."""
        self._socket.settimeout(seconds)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return False
        except ConnectionResetError:
            data = b""
        finally:
            self._socket.settimeout(PATIENCE_SECONDS)
        self.is_closed = self.is_closed or not data
        self._received += data
        while len(self._received) >= 9:
            size = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + size:
                break
            kind, flags = self._received[3], self._received[4]
            stream = int.from_bytes(self._received[5:9], "big")
            payload, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._handle(kind, flags, stream, payload)
        if not self.is_closed:
            self._send()
        return bool(data)

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & _ACK:
            for place in range(0, len(payload), 6):
                if int.from_bytes(payload[place : place + 2], "big") == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    initial = int.from_bytes(payload[place + 2 : place + 6], "big")
                    self._windows = {s: w + initial - self._initial for s, w in self._windows.items()}
                    self._initial = initial
            self._socket.sendall(frame(SETTINGS, flags=_ACK))
        elif kind == PING and not flags & _ACK:
            self._socket.sendall(frame(PING, payload, _ACK))
        elif kind == WINDOW_UPDATE:
            grant = int.from_bytes(payload, "big")
            if stream:
                self._windows[stream] += grant
            else:
                self._window += grant
        elif kind == GOAWAY:
            self.goaway += payload
        elif kind == RST_STREAM or (kind == HEADERS and flags & 1):
            self.ended[stream] = self.ended.get(stream, b"") + payload
            self._unsent.pop(stream, None)

    def _send(self) -> None:
        for stream in list(self._unsent):
            while self._unsent.get(stream):
                count = min(self._window, self._windows[stream], _MAX_FRAME_BYTES, len(self._unsent[stream]))
                if count <= 0:
                    break
                part, self._unsent[stream] = self._unsent[stream][:count], self._unsent[stream][count:]
                self._socket.sendall(frame(DATA, part, stream=stream))
                self._window -= count
                self._windows[stream] -= count
                self.sent[stream] += count


def _literal(name: str, value: str) -> bytes:
    """Return a header field without Huffman coding and without indexing (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
