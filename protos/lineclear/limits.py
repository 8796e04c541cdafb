"""Figures that both ends of a call must agree on. Each is written here and nowhere else."""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Largest gRPC message, either way, unless an operator sets another (then clients set it too: `options`). A prompt of
half a megabyte of text, or of a million token ids, has room; so have the answers to thousands of unread tokens."""
