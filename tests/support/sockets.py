"""Where the tests get their ZeroMQ sockets from: those that wait for nobody when they go. And free ports."""

from __future__ import annotations

import socket

import zmq


def bare_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context whose sockets drop what they have not sent when they are closed, however that comes about.

    Naming the linger at the end, as in `destroy(linger=0)`, is too late for a socket that was only forgotten: by
    default it keeps what nobody took, and the context's end waits for it for ever.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.linger = 0
    return context


def free_ports(count: int) -> list[int]:
    """Return so many ports of 127.0.0.1 that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
