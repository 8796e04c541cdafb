"""Time limits of tests, long enough for a busy machine. They only decide when a test gives up."""

from __future__ import annotations

PATIENCE_SECONDS = 120.0
"""Limit for an event that must happen; only a hang takes longer."""
SOON_SECONDS = 60.0
"""Limit for an immediate effect, where a timeout of the product that is longer still could also cause it."""
