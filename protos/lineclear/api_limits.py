"""Figures that both ends of a call must agree on. Each is written here and nowhere else."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest gRPC message that a server sends, and that a client sends or takes, unless `options` say otherwise."""
MAX_REQUEST_BYTES = 1024 * 1024
"""Largest request that a server takes unless its operator sets another limit (`max_message_bytes`). Half a megabyte of
text fits, and so do 250,000 token ids."""
REQUEST_BYTES_KEY = "lineclear-max-request-bytes"
"""Initial metadata of a session: the largest request in bytes that this server takes. A larger one fails alone up to
twice the limit; beyond that gRPC ends the whole session."""
MAX_PIECE_BYTES = 1024 * 1024
"""Streamed answers are cut into messages of about this size."""

MAX_SESSION_COMMANDS = 32
"""Most commands in one SessionRequest. The server handles them in one go, so more would delay its responses."""
MAX_GATHERED_BYTES = 64 * 1024
"""Most bytes of the commands that share a message. A larger one is sent alone, and fails alone if it is too large."""


def output_seed(seed: int, index: int) -> int:
    """Return the seed of output `index` of a request with `seed`, as in vLLM. A negative index reverses it."""
    return (seed + index) % 2**64
