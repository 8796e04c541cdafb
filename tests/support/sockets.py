"""ZeroMQ contexts that never block at exit, and free TCP ports."""

from __future__ import annotations

import socket

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
    """Return `count` free ports of 127.0.0.1."""
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
