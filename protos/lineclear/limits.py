"""Figures that both ends of a call must agree on. Each is written here and nowhere else."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest gRPC message, either way, unless an operator sets another (then clients set it too: `options`). A prompt of
half a megabyte of text, or of a million token ids, has room; so have the answers to thousands of unread tokens."""

MAX_SESSION_ORDERS = 32
"""Most orders in one message of a session. A server obeys them in one go: more would hold up what it sends."""
MAX_GATHERED_BYTES = 64 * 1024
"""Most bytes of the orders that share a message. One that is larger goes alone, and fails alone if it is too large."""
SESSION_ORDERS_KEY = "lineclear-session-orders"
"""Initial metadata of a session, in which a server says how many orders it takes in a message."""
