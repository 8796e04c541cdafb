"""ZeroMQ contexts that never block at exit, free TCP ports, and a gate in front of a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import zmq


def bare_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose sockets drop unsent messages when they are closed.

    Without it, a socket that a test did not close keeps its messages, and terminating the context waits for ever.
    `destroy(linger=0)` is too late for such a socket.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    return context


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


@contextlib.asynccontextmanager
async def gate(path: Path) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield another address of the server below `path` that forwards bytes both ways while the event is set."""
    is_open = asyncio.Event()
    is_open.set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await is_open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_unix_connection(path / "s")
        await asyncio.gather(carry(reader, to_server), carry(from_server, writer))

    async with await asyncio.start_unix_server(connected, path / "gate"):
        yield f"unix:{path}/gate", is_open
